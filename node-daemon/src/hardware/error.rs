//! NVML's errors with the call that they came from.

use std::borrow::Cow;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

/// An `nvmlReturn_t` other than `NVML_SUCCESS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u32);

macro_rules! codes {
    ($($name:ident = $constant:ident),* $(,)?) => {
        impl Code {
            $(#[doc = concat!("`", stringify!($constant), "`")] pub const $name: Code = Code(sys::$constant);)*

            /// The word after `NVML_ERROR_`, as in NVIDIA's documentation.
            pub fn name(self) -> Cow<'static, str> {
                match self {
                    $(Code::$name => Cow::Borrowed(stringify!($name)),)*
                    Code(number) => Cow::Owned(format!("NVML_ERROR_{number}")),
                }
            }
        }
    };
}

codes! {
    UNINITIALIZED = nvmlReturn_enum_NVML_ERROR_UNINITIALIZED,
    INVALID_ARGUMENT = nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
    NOT_SUPPORTED = nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
    NO_PERMISSION = nvmlReturn_enum_NVML_ERROR_NO_PERMISSION,
    ALREADY_INITIALIZED = nvmlReturn_enum_NVML_ERROR_ALREADY_INITIALIZED,
    NOT_FOUND = nvmlReturn_enum_NVML_ERROR_NOT_FOUND,
    INSUFFICIENT_SIZE = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE,
    INSUFFICIENT_POWER = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER,
    DRIVER_NOT_LOADED = nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED,
    TIMEOUT = nvmlReturn_enum_NVML_ERROR_TIMEOUT,
    IRQ_ISSUE = nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE,
    LIBRARY_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND,
    FUNCTION_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND,
    CORRUPTED_INFOROM = nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM,
    GPU_IS_LOST = nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST,
    RESET_REQUIRED = nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED,
    OPERATING_SYSTEM = nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM,
    LIB_RM_VERSION_MISMATCH = nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    IN_USE = nvmlReturn_enum_NVML_ERROR_IN_USE,
    MEMORY = nvmlReturn_enum_NVML_ERROR_MEMORY,
    NO_DATA = nvmlReturn_enum_NVML_ERROR_NO_DATA,
    VGPU_ECC_NOT_SUPPORTED = nvmlReturn_enum_NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
    INSUFFICIENT_RESOURCES = nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES,
    FREQ_NOT_SUPPORTED = nvmlReturn_enum_NVML_ERROR_FREQ_NOT_SUPPORTED,
    ARGUMENT_VERSION_MISMATCH = nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    DEPRECATED = nvmlReturn_enum_NVML_ERROR_DEPRECATED,
    NOT_READY = nvmlReturn_enum_NVML_ERROR_NOT_READY,
    GPU_NOT_FOUND = nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND,
    INVALID_STATE = nvmlReturn_enum_NVML_ERROR_INVALID_STATE,
    RESET_TYPE_NOT_SUPPORTED = nvmlReturn_enum_NVML_ERROR_RESET_TYPE_NOT_SUPPORTED,
    UNKNOWN = nvmlReturn_enum_NVML_ERROR_UNKNOWN,
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {}", .code.name())]
pub struct Failure {
    /// NVML's function, without version suffix.
    pub call: &'static str,
    pub code: Code,
}

impl Failure {
    /// Whether the driver under the library is gone or another one, so that the library must be initialised anew.
    pub fn driver_is_gone(&self) -> bool {
        matches!(self.code, Code::UNINITIALIZED | Code::DRIVER_NOT_LOADED | Code::LIB_RM_VERSION_MISMATCH)
    }

    /// Whether a GPU is gone. A library initialised anew may find it again.
    pub fn gpu_is_gone(&self) -> bool {
        matches!(self.code, Code::GPU_IS_LOST | Code::GPU_NOT_FOUND)
    }
}

/// Gives an error of nvml-wrapper its number back. What it cannot name is UNKNOWN there too.
pub(super) fn failed(call: &'static str, error: &NvmlError) -> Failure {
    let code = match error {
        NvmlError::Uninitialized => Code::UNINITIALIZED,
        NvmlError::InvalidArg => Code::INVALID_ARGUMENT,
        NvmlError::NotSupported => Code::NOT_SUPPORTED,
        NvmlError::NoPermission => Code::NO_PERMISSION,
        NvmlError::NotFound => Code::NOT_FOUND,
        NvmlError::InsufficientSize(_) => Code::INSUFFICIENT_SIZE,
        NvmlError::InsufficientPower => Code::INSUFFICIENT_POWER,
        NvmlError::DriverNotLoaded => Code::DRIVER_NOT_LOADED,
        NvmlError::Timeout => Code::TIMEOUT,
        NvmlError::IrqIssue => Code::IRQ_ISSUE,
        NvmlError::LibraryNotFound | NvmlError::LibloadingError(_) => Code::LIBRARY_NOT_FOUND,
        NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_) => Code::FUNCTION_NOT_FOUND,
        NvmlError::CorruptedInfoROM => Code::CORRUPTED_INFOROM,
        NvmlError::GpuLost => Code::GPU_IS_LOST,
        NvmlError::ResetRequired => Code::RESET_REQUIRED,
        NvmlError::OperatingSystem => Code::OPERATING_SYSTEM,
        NvmlError::LibRmVersionMismatch => Code::LIB_RM_VERSION_MISMATCH,
        NvmlError::InUse => Code::IN_USE,
        NvmlError::InsufficientMemory => Code::MEMORY,
        NvmlError::NoData => Code::NO_DATA,
        NvmlError::VgpuEccNotSupported => Code::VGPU_ECC_NOT_SUPPORTED,
        _ => Code::UNKNOWN,
    };
    Failure { call, code }
}
