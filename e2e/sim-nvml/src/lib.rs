//! `libnvidia-ml.so.1` of a simulated node: NVML's C interface over the engine of `kerf-sim`.
//!
//! ```text
//!  C caller ─▶ system, device, mig, instance, process, event   one function per NVML function, no unsafe in them
//!                     │ call(): refcount, delays, faults, log, panics
//!                     ▼
//!               driver: which node, current state          ffi: raw pointers in and out
//! ```
//!
//! Structures are laid out as in nvml.h of CUDA 13 (`types`). A function that is not here is FUNCTION_NOT_FOUND
//! to its callers, as with an older driver.

#![allow(unsafe_code, reason = "a C interface: exported names, and pointers that callers pass (module ffi)")]
#![allow(non_snake_case, reason = "the functions have NVML's names")]

mod device;
mod driver;
mod event;
mod ffi;
mod instance;
mod mig;
mod process;
mod system;
mod types;
mod vitals;

/// Defines an exported NVML function. The handle named after `on` says which GPU the call is for.
macro_rules! nvml {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(on $handle:ident)? |$call:ident| $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $type),*) -> u32 {
                let gpu: Option<usize> = None$(.or($handle.gpu()))?;
                $crate::driver::call(stringify!($name), gpu, |$call| $body)
            }
        )*
    };
}
pub(crate) use nvml;
