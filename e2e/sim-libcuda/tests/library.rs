//! The library as a program loads it. One test: a process initialises CUDA once.

#![allow(unsafe_code, reason = "calls C functions by name")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::unix::fs::PermissionsExt as _;
use std::ptr::{null, null_mut};

use kerf_sim::{NodeSpec, SimNode};
use libloading::Library;

const GIB: usize = 1 << 30;

/// Calls a function by its signature; the error's number, if it is one.
macro_rules! call {
    ($library:expr, $name:literal ( $($argument:expr => $type:ty),* )) => {{
        // SAFETY: the signatures are those of cuda.h, and pointers are to live local values.
        let code = unsafe {
            let function = $library.get::<unsafe extern "C" fn($($type),*) -> c_uint>($name.as_bytes()).unwrap();
            function($($argument),*)
        };
        if code == 0 { Ok(()) } else { Err(code) }
    }};
}

#[test]
fn a_program_finds_a_gpu_and_its_limits() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let node =
        SimNode::create(&folder.path().join("root"), &NodeSpec::uniform("test", "h100-80-sxm", 1)).unwrap();
    node.set_pid_namespace(Some(0)).unwrap();
    node.run_kernel().unwrap();
    let file = node.library().with_file_name("libcuda.so.1");
    // SAFETY: the library has no initialisers.
    let cuda = unsafe { Library::new(&file) }.unwrap();

    // cuda.h's numbers, in cuda.h's cases.
    let mut device: c_int = -1;
    assert_eq!(
        call!(cuda, "cuDeviceGet"(&raw mut device => *mut c_int, 0 => c_int)),
        Err(3),
        "not initialised"
    );
    call!(cuda, "cuInit"(0 => c_uint)).unwrap();
    assert_eq!(
        call!(cuda, "cuDeviceGet"(&raw mut device => *mut c_int, 1 => c_int)),
        Err(101),
        "no such device"
    );
    call!(cuda, "cuDeviceGet"(&raw mut device => *mut c_int, 0 => c_int)).unwrap();
    let mut address = 0u64;
    let allocate = |address: &mut u64, bytes: usize| call!(cuda, "cuMemAlloc_v2"(&raw mut *address => *mut u64, bytes => usize));
    assert_eq!(allocate(&mut address, 1), Err(201), "no context");
    let mut name: *const c_char = null();
    call!(cuda, "cuGetErrorName"(2 => c_uint, &raw mut name => *mut *const c_char)).unwrap();
    // SAFETY: the library gives out strings that stay.
    assert_eq!(unsafe { CStr::from_ptr(name) }.to_str(), Ok("CUDA_ERROR_OUT_OF_MEMORY"));

    let mut name = [0 as c_char; 16];
    call!(cuda, "cuDeviceGetName"(name.as_mut_ptr() => *mut c_char, 16 => c_int, 0 => c_int)).unwrap();
    // SAFETY: the call has ended the string.
    assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }.to_str(), Ok("NVIDIA H100 80G"), "cut to the buffer");
    let mut count: c_int = 0;
    let attribute = |count: &mut c_int, which: c_uint| call!(cuda, "cuDeviceGetAttribute"(&raw mut *count => *mut c_int, which => c_uint, 0 => c_int));
    attribute(&mut count, 16).unwrap();
    assert_eq!(count, 132);
    assert_eq!(attribute(&mut count, 1), Err(1), "an attribute that is not played");

    let mut context: *mut c_void = null_mut();
    call!(cuda, "cuCtxCreate_v2"(&raw mut context => *mut *mut c_void, 0 => c_uint, 0 => c_int)).unwrap();
    let (mut free, mut total) = (0usize, 0usize);
    let mut info = || {
        call!(cuda, "cuMemGetInfo_v2"(&raw mut free => *mut usize, &raw mut total => *mut usize)).unwrap();
        (free, total)
    };
    let (before, of) = info();
    assert_eq!(of, 81559 << 20);
    allocate(&mut address, 10 * GIB).unwrap();
    assert_eq!(info().0, before - 10 * GIB);
    assert_eq!(allocate(&mut 0, before), Err(2), "more than there is");
    call!(cuda, "cuMemFree_v2"(address => u64)).unwrap();
    assert_eq!(call!(cuda, "cuMemFree_v2"(address => u64)), Err(1), "it is free already");
    assert_eq!(info().0, before);

    // The one kernel that is played.
    let mut module: *mut c_void = null_mut();
    let mut load = |ptx: &CStr| {
        call!(cuda, "cuModuleLoadData"(&raw mut module => *mut *mut c_void, ptx.as_ptr() => *const c_char))
            .map(|()| module)
    };
    assert_eq!(load(c"not PTX").unwrap_err(), 218);
    let module = load(c".version 6.0 .entry where(.param .u64 out) { mov.u32 %r1, %smid; }").unwrap();
    let mut function: *mut c_void = null_mut();
    let mut find = |name: &CStr| {
        let place = &raw mut function;
        call!(cuda, "cuModuleGetFunction"(place => *mut *mut c_void, module => *mut c_void, name.as_ptr() => *const c_char))
            .map(|()| function)
    };
    assert_eq!(find(c"another").unwrap_err(), 500);
    let function = find(c"where").unwrap();
    const BLOCKS: u32 = 500;
    allocate(&mut address, BLOCKS as usize * 4).unwrap();
    let mut parameters: [*mut c_void; 1] = [(&raw mut address).cast()];
    let mut launch = |blocks: u32| {
        call!(cuda, "cuLaunchKernel"(
            function => *mut c_void, blocks => c_uint, 1 => c_uint, 1 => c_uint, 64 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, null_mut() => *mut c_void, parameters.as_mut_ptr() => *mut *mut c_void,
            null_mut() => *mut *mut c_void
        ))
    };
    assert_eq!(launch(BLOCKS + 1), Err(719), "it would write beyond its memory");
    launch(BLOCKS).unwrap();
    call!(cuda, "cuCtxSynchronize"()).unwrap();
    let mut places = vec![0u32; BLOCKS as usize];
    let bytes = places.len() * 4;
    call!(cuda, "cuMemcpyDtoH_v2"(places.as_mut_ptr().cast() => *mut u8, address => u64, bytes => usize))
        .unwrap();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places, (0..132).collect::<Vec<u32>>());
}
