//! The ABI check: the exported functions, structures and codes against cudarc's declarations of the vendor's.

use crate::library;
use cudarc::driver::sys;

#[test]
fn every_exported_function_takes_what_the_vendors_takes() {
    highwater_simulated_blas::signature::check(&[library::signatures()]);
}

#[test]
fn structures_are_laid_out_as_the_vendors() {
    use library::layout::{AccessDescription, AllocationProperties, IpcHandle, Uuid};
    assert_eq!(size_of::<AllocationProperties>(), size_of::<sys::CUmemAllocationProp>());
    assert_eq!(size_of::<AccessDescription>(), size_of::<sys::CUmemAccessDesc>());
    assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcMemHandle>());
    assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcEventHandle>());
    assert_eq!(size_of::<Uuid>(), size_of::<sys::CUuuid>());
    let location = std::mem::offset_of!(sys::CUmemAllocationProp, location);
    assert_eq!(location, std::mem::offset_of!(AllocationProperties, location_kind));
    assert_eq!(
        std::mem::offset_of!(sys::CUmemAllocationProp, requestedHandleTypes),
        std::mem::offset_of!(AllocationProperties, handle_types)
    );
    assert_eq!(std::mem::offset_of!(sys::CUmemAccessDesc, flags), std::mem::offset_of!(AccessDescription, flags));
}

#[test]
fn codes_have_the_vendors_numbers() {
    use highwater_simulated_engine::Code;
    use sys::cudaError_enum as vendor;
    for (ours, theirs) in [
        (Code::INVALID_VALUE, vendor::CUDA_ERROR_INVALID_VALUE),
        (Code::OUT_OF_MEMORY, vendor::CUDA_ERROR_OUT_OF_MEMORY),
        (Code::NOT_INITIALIZED, vendor::CUDA_ERROR_NOT_INITIALIZED),
        (Code::DEINITIALIZED, vendor::CUDA_ERROR_DEINITIALIZED),
        (Code::STUB_LIBRARY, vendor::CUDA_ERROR_STUB_LIBRARY),
        (Code::NO_DEVICE, vendor::CUDA_ERROR_NO_DEVICE),
        (Code::INVALID_DEVICE, vendor::CUDA_ERROR_INVALID_DEVICE),
        (Code::INVALID_CONTEXT, vendor::CUDA_ERROR_INVALID_CONTEXT),
        (Code::PEER_ACCESS_UNSUPPORTED, vendor::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED),
        (Code::OPERATING_SYSTEM, vendor::CUDA_ERROR_OPERATING_SYSTEM),
        (Code::INVALID_HANDLE, vendor::CUDA_ERROR_INVALID_HANDLE),
        (Code::ILLEGAL_STATE, vendor::CUDA_ERROR_ILLEGAL_STATE),
        (Code::NOT_FOUND, vendor::CUDA_ERROR_NOT_FOUND),
        (Code::NOT_READY, vendor::CUDA_ERROR_NOT_READY),
        (Code::ILLEGAL_ADDRESS, vendor::CUDA_ERROR_ILLEGAL_ADDRESS),
        (Code::PEER_ACCESS_ALREADY_ENABLED, vendor::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
        (Code::PEER_ACCESS_NOT_ENABLED, vendor::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED),
        (Code::CONTEXT_IS_DESTROYED, vendor::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        (Code::HOST_MEMORY_ALREADY_REGISTERED, vendor::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
        (Code::HOST_MEMORY_NOT_REGISTERED, vendor::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        (Code::LAUNCH_FAILED, vendor::CUDA_ERROR_LAUNCH_FAILED),
        (Code::NOT_PERMITTED, vendor::CUDA_ERROR_NOT_PERMITTED),
        (Code::NOT_SUPPORTED, vendor::CUDA_ERROR_NOT_SUPPORTED),
        (Code::STREAM_CAPTURE_UNSUPPORTED, vendor::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        (Code::STREAM_CAPTURE_INVALIDATED, vendor::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
        (Code::STREAM_CAPTURE_MERGE, vendor::CUDA_ERROR_STREAM_CAPTURE_MERGE),
        (Code::STREAM_CAPTURE_UNMATCHED, vendor::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED),
        (Code::STREAM_CAPTURE_UNJOINED, vendor::CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
        (Code::STREAM_CAPTURE_ISOLATION, vendor::CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
        (Code::STREAM_CAPTURE_IMPLICIT, vendor::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
        (Code::CAPTURED_EVENT, vendor::CUDA_ERROR_CAPTURED_EVENT),
        (Code::STREAM_CAPTURE_WRONG_THREAD, vendor::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
        (Code::UNKNOWN, vendor::CUDA_ERROR_UNKNOWN),
    ] {
        assert_eq!(ours.0, theirs as u32);
        let (name, _) = Code::describe(ours.0).unwrap();
        assert_eq!(name.trim_end_matches('\0'), format!("{theirs:?}"));
    }
}
