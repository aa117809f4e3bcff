//! Means and confidence intervals.

/// Mean and half the width of its 95 % confidence interval (Student's t).
pub fn mean(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    if values.len() < 2 {
        return (mean, f64::NAN);
    }
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, student(values.len() - 1) * (variance / n).sqrt())
}

/// 97.5 % quantile of Student's distribution, from 30 degrees of freedom on that of the normal one.
fn student(degrees: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
        2.045, 2.042,
    ];
    TABLE.get(degrees - 1).copied().unwrap_or(1.96)
}

/// `87.31 ± 0.12`
pub fn text(values: &[f64]) -> String {
    let (mean, half) = mean(values);
    format!("{mean:.2} ± {half:.2}")
}

/// What each of the first has more than its counterpart.
pub fn differences(of: &[f64], to: &[f64]) -> Vec<f64> {
    of.iter().zip(to).map(|(of, to)| of - to).collect()
}
