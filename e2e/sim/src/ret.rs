//! NVML's return codes (`nvmlReturn_t`, nvml.h of CUDA 13).

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($variant:ident = $number:literal, $name:literal, $text:literal;)*) => {
        /// An NVML return code other than success.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum NvmlError {
            $(#[doc = $text] $variant,)*
        }

        impl NvmlError {
            /// Every code, in the order of their numbers.
            pub const ALL: &'static [NvmlError] = &[$(NvmlError::$variant,)*];

            /// The number that C callers see.
            pub const fn code(self) -> u32 {
                match self { $(NvmlError::$variant => $number,)* }
            }

            /// The name in nvml.h without the prefix `NVML_ERROR_`.
            pub const fn name(self) -> &'static str {
                match self { $(NvmlError::$variant => $name,)* }
            }

            /// What `nvmlErrorString` answers.
            pub const fn text(self) -> &'static str {
                match self { $(NvmlError::$variant => $text,)* }
            }
        }
    };
}

codes! {
    Uninitialized = 1, "UNINITIALIZED", "Uninitialized";
    InvalidArgument = 2, "INVALID_ARGUMENT", "Invalid Argument";
    NotSupported = 3, "NOT_SUPPORTED", "Not Supported";
    NoPermission = 4, "NO_PERMISSION", "Insufficient Permissions";
    AlreadyInitialized = 5, "ALREADY_INITIALIZED", "Already Initialized";
    NotFound = 6, "NOT_FOUND", "Not Found";
    InsufficientSize = 7, "INSUFFICIENT_SIZE", "Insufficient Size";
    InsufficientPower = 8, "INSUFFICIENT_POWER", "Insufficient External Power";
    DriverNotLoaded = 9, "DRIVER_NOT_LOADED", "Driver Not Loaded";
    Timeout = 10, "TIMEOUT", "Timeout";
    IrqIssue = 11, "IRQ_ISSUE", "Interrupt Request Issue";
    LibraryNotFound = 12, "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found";
    FunctionNotFound = 13, "FUNCTION_NOT_FOUND", "Function Not Found";
    CorruptedInforom = 14, "CORRUPTED_INFOROM", "Corrupted infoROM";
    GpuIsLost = 15, "GPU_IS_LOST", "GPU is lost";
    ResetRequired = 16, "RESET_REQUIRED", "GPU requires reset";
    OperatingSystem = 17, "OPERATING_SYSTEM", "The operating system has blocked the request";
    LibRmVersionMismatch = 18, "LIB_RM_VERSION_MISMATCH", "RM has detected an NVML/RM version mismatch";
    InUse = 19, "IN_USE", "In use by another client";
    Memory = 20, "MEMORY", "Insufficient Memory";
    NoData = 21, "NO_DATA", "No data";
    VgpuEccNotSupported = 22, "VGPU_ECC_NOT_SUPPORTED", "Virtual GPU is not supported when ECC is enabled";
    InsufficientResources = 23, "INSUFFICIENT_RESOURCES", "Insufficient Resources";
    FreqNotSupported = 24, "FREQ_NOT_SUPPORTED", "Frequency is not supported";
    ArgumentVersionMismatch = 25, "ARGUMENT_VERSION_MISMATCH", "Argument version mismatch";
    Deprecated = 26, "DEPRECATED", "Deprecated";
    NotReady = 27, "NOT_READY", "Not ready";
    GpuNotFound = 28, "GPU_NOT_FOUND", "GPU not found";
    InvalidState = 29, "INVALID_STATE", "Invalid state";
    ResetTypeNotSupported = 30, "RESET_TYPE_NOT_SUPPORTED", "Reset type not supported";
    Unknown = 999, "UNKNOWN", "Unknown Error";
}

impl NvmlError {
    /// The error with this number.
    pub fn from_code(code: u32) -> Option<NvmlError> {
        NvmlError::ALL.iter().copied().find(|error| error.code() == code)
    }

    /// The error with this name, with or without `NVML_ERROR_`, in any case.
    pub fn from_name(name: &str) -> Option<NvmlError> {
        let name = name.to_ascii_uppercase();
        let name = name.strip_prefix("NVML_ERROR_").unwrap_or(&name);
        NvmlError::ALL.iter().copied().find(|error| error.name() == name)
    }
}

impl std::fmt::Display for NvmlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NVML_ERROR_{} ({})", self.name(), self.text())
    }
}

impl std::error::Error for NvmlError {}
