//! What the authors of FGD (Weng et al., "Beware of Fragmentation", USENIX ATC'23) published for the lists of the openb
//! trace: allocated GPUs in percent when the GPUs asked for reach all there are, mean of ten seeds. From the results in
//! the repository of their simulator (hkust-adsl/kubernetes-scheduler-simulator,
//! `experiments/analysis/expected_results/analysis_allo_discrete.csv`, column 100).

/// The policies, in the order of the values.
pub const POLICIES: [&str; 6] = ["Random", "DotProd", "GpuClustering", "GpuPacking", "BestFit", "FGD"];

/// By list.
pub const LISTS: [(&str, [f64; POLICIES.len()]); 17] = [
    ("cpu050", [89.02, 93.03, 93.52, 93.46, 93.56, 95.00]),
    ("cpu100", [87.44, 91.73, 92.42, 92.50, 93.26, 95.21]),
    ("cpu200", [83.03, 87.45, 89.67, 89.98, 92.15, 94.82]),
    ("cpu250", [80.00, 83.57, 87.75, 88.05, 91.21, 93.20]),
    ("default", [86.30, 90.62, 91.65, 91.78, 92.86, 95.23]),
    ("gpushare100", [78.90, 81.98, 82.22, 82.13, 84.62, 86.64]),
    ("gpushare40", [84.86, 89.30, 89.76, 89.77, 91.44, 93.96]),
    ("gpushare60", [82.81, 86.82, 86.90, 87.15, 89.06, 91.25]),
    ("gpushare80", [80.62, 84.14, 84.50, 84.65, 86.66, 89.08]),
    ("gpuspec10", [86.26, 90.17, 91.96, 92.24, 93.10, 94.66]),
    ("gpuspec20", [85.90, 88.29, 89.11, 89.28, 88.46, 94.66]),
    ("gpuspec25", [85.42, 85.44, 86.41, 86.77, 85.67, 93.91]),
    ("gpuspec33", [83.87, 79.82, 81.09, 82.22, 80.39, 87.84]),
    ("multigpu20", [86.92, 91.85, 93.34, 93.50, 93.73, 95.53]),
    ("multigpu30", [86.63, 93.11, 94.55, 94.70, 94.57, 96.36]),
    ("multigpu40", [85.38, 94.04, 95.35, 95.59, 95.10, 96.91]),
    ("multigpu50", [81.28, 94.73, 95.69, 96.06, 95.62, 97.09]),
];
