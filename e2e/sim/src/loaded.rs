//! Where a library of the simulation was loaded from.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The file of the library that a function is in, symbolic links resolved.
#[allow(unsafe_code, reason = "the standard library cannot ask the loader")]
pub fn library_of(function: *const ()) -> Option<PathBuf> {
    // SAFETY: dladdr fills the structure if it succeeds; its strings live as long as the library is loaded.
    let path = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(function.cast(), &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        PathBuf::from(OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes()))
    };
    path.canonicalize().ok()
}
