//! The meaning of CUDA's and cuBLAS's codes.

use cudarc::cublas::sys::cublasStatus_t;
use cudarc::driver::sys::CUresult;
use highwater_driver::{Code, Codes};
use highwater_hal::ErrorKind;

/// Creates rows from codes of the driver, each with its kind and hint.
macro_rules! rows {
    ($($code:ident: $kind:ident, $hint:expr;)*) => {
        &[$(Code::new(CUresult::$code as i32, stringify!($code), ErrorKind::$kind, $hint)),*]
    };
}

const LOST: &str = "the context is lost for the whole process; end the process, and look for the cause in earlier work";
const CAPTURED: &str = "end the capture and begin again; make forbidden calls before or after the capture";

/// The codes of the driver.
pub(crate) static CUDA: Codes = Codes {
    library: "CUDA",
    rows: rows! {
        CUDA_ERROR_INVALID_VALUE: InvalidArgument, "check sizes, addresses and flags of the call";
        CUDA_ERROR_OUT_OF_MEMORY: OutOfMemory, "free memory, request fewer bytes, or use another device";
        CUDA_ERROR_NOT_INITIALIZED: InvalidState, "CUDA is not initialized in this process; after a fork, start a new program instead";
        CUDA_ERROR_DEINITIALIZED: ShuttingDown, "the driver has ended with the process";
        CUDA_ERROR_STUB_LIBRARY: LibraryMissing, "the file is a toolkit's stub; remove its folder from the library path, so that the loader finds the driver's libcuda.so.1";
        CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER: Unsupported, "install a newer driver";
        CUDA_ERROR_DEVICE_UNAVAILABLE: DeviceMissing, "another process uses the device exclusively";
        CUDA_ERROR_NO_DEVICE: DeviceMissing, "no device is visible; check `nvidia-smi` and CUDA_VISIBLE_DEVICES";
        CUDA_ERROR_INVALID_DEVICE: InvalidArgument, "pass an ordinal below `device_count`";
        CUDA_ERROR_INVALID_CONTEXT: InvalidState, "the device's context is not current, or foreign code destroyed it";
        CUDA_ERROR_MAP_FAILED: Vendor, "";
        CUDA_ERROR_ECC_UNCORRECTABLE: DeviceLost, LOST;
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: Unsupported, "copy through the host, or use devices with peer access";
        CUDA_ERROR_NVLINK_UNCORRECTABLE: DeviceLost, LOST;
        CUDA_ERROR_CONTAINED: DeviceLost, LOST;
        CUDA_ERROR_OPERATING_SYSTEM: OperatingSystem, "read the system's log";
        CUDA_ERROR_INVALID_HANDLE: InvalidHandle, "the object was destroyed, or belongs to another device";
        CUDA_ERROR_ILLEGAL_STATE: InvalidState, "the object's state does not allow this call";
        CUDA_ERROR_NOT_FOUND: Vendor, "";
        CUDA_ERROR_NOT_READY: InvalidState, "wait for the work to finish first";
        CUDA_ERROR_ILLEGAL_ADDRESS: DeviceLost, LOST;
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: OutOfMemory, "";
        CUDA_ERROR_LAUNCH_TIMEOUT: DeviceLost, LOST;
        CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: InvalidState, "";
        CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: InvalidState, "";
        CUDA_ERROR_CONTEXT_IS_DESTROYED: ShuttingDown, "foreign code destroyed the device's primary context";
        CUDA_ERROR_ASSERT: DeviceLost, LOST;
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: InvalidArgument, "register each range once, and no memory that was allocated page-locked";
        CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: InvalidPointer, "pass the start of a registered range";
        CUDA_ERROR_HARDWARE_STACK_ERROR: DeviceLost, LOST;
        CUDA_ERROR_ILLEGAL_INSTRUCTION: DeviceLost, LOST;
        CUDA_ERROR_MISALIGNED_ADDRESS: DeviceLost, LOST;
        CUDA_ERROR_INVALID_ADDRESS_SPACE: DeviceLost, LOST;
        CUDA_ERROR_INVALID_PC: DeviceLost, LOST;
        CUDA_ERROR_LAUNCH_FAILED: DeviceLost, LOST;
        CUDA_ERROR_TENSOR_MEMORY_LEAK: DeviceLost, LOST;
        CUDA_ERROR_NOT_PERMITTED: PermissionDenied, "the system does not permit this call";
        CUDA_ERROR_NOT_SUPPORTED: Unsupported, "the device or its driver does not support this call";
        CUDA_ERROR_SYSTEM_NOT_READY: DeviceMissing, "start the fabric manager";
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: Unsupported, "the kernel's driver and its library have different versions; restart the machine, or reinstall the driver";
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: Unsupported, "remove the forward-compatibility libraries from the library path, or install a newer driver";
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: Capture, CAPTURED;
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: Capture, CAPTURED;
        CUDA_ERROR_STREAM_CAPTURE_MERGE: Capture, CAPTURED;
        CUDA_ERROR_STREAM_CAPTURE_UNMATCHED: Capture, CAPTURED;
        CUDA_ERROR_STREAM_CAPTURE_UNJOINED: Capture, "make the first stream wait for every stream that joined, then end the capture";
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION: Capture, "a capture cannot wait for earlier work, and other streams cannot wait for work inside it";
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: Capture, "the legacy default stream cannot take part in a capture";
        CUDA_ERROR_CAPTURED_EVENT: Capture, "wait for the event only in the capture that recorded it";
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: Capture, "end the capture on the thread that began it";
        CUDA_ERROR_TIMEOUT: Vendor, "";
        CUDA_ERROR_EXTERNAL_DEVICE: DeviceLost, LOST;
        CUDA_ERROR_UNKNOWN: Vendor, "";
    },
};

macro_rules! status_rows {
    ($($code:ident: $kind:ident, $hint:expr;)*) => {
        &[$(Code::new(cublasStatus_t::$code as i32, stringify!($code), ErrorKind::$kind, $hint)),*]
    };
}

/// The codes of cuBLAS and cuBLASLt.
pub(crate) static CUBLAS: Codes = Codes {
    library: "cuBLAS",
    rows: status_rows! {
        CUBLAS_STATUS_NOT_INITIALIZED: InvalidState, "the driver is too old for this cuBLAS, the context is lost, or a capture forbids the call";
        CUBLAS_STATUS_ALLOC_FAILED: OutOfMemory, "free device memory, or use fewer handles";
        CUBLAS_STATUS_INVALID_VALUE: InvalidArgument, "check sizes, leading dimensions and addresses";
        CUBLAS_STATUS_ARCH_MISMATCH: Unsupported, "the device is too old for this operation";
        CUBLAS_STATUS_MAPPING_ERROR: Vendor, "";
        CUBLAS_STATUS_EXECUTION_FAILED: Vendor, "an earlier error of the device is the usual cause; synchronize after each call to find it";
        CUBLAS_STATUS_INTERNAL_ERROR: Vendor, "an earlier error of the device or exhausted memory is the usual cause";
        CUBLAS_STATUS_NOT_SUPPORTED: Unsupported, "this combination of types, sizes and alignments has no kernel";
        CUBLAS_STATUS_LICENSE_ERROR: Unsupported, "";
    },
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_vendors_and_mean_what_a_program_can_act_on() {
        use ErrorKind::*;
        let expected: &[(i32, ErrorKind)] = &[
            (1, InvalidArgument),
            (2, OutOfMemory),
            (3, InvalidState),
            (4, ShuttingDown),
            (34, LibraryMissing),
            (36, Unsupported),
            (46, DeviceMissing),
            (100, DeviceMissing),
            (101, InvalidArgument),
            (201, InvalidState),
            (205, Vendor),
            (214, DeviceLost),
            (217, Unsupported),
            (220, DeviceLost),
            (226, DeviceLost),
            (304, OperatingSystem),
            (400, InvalidHandle),
            (401, InvalidState),
            (500, Vendor),
            (600, InvalidState),
            (700, DeviceLost),
            (701, OutOfMemory),
            (702, DeviceLost),
            (704, InvalidState),
            (705, InvalidState),
            (709, ShuttingDown),
            (710, DeviceLost),
            (712, InvalidArgument),
            (713, InvalidPointer),
            (714, DeviceLost),
            (715, DeviceLost),
            (716, DeviceLost),
            (717, DeviceLost),
            (718, DeviceLost),
            (719, DeviceLost),
            (721, DeviceLost),
            (800, PermissionDenied),
            (801, Unsupported),
            (802, DeviceMissing),
            (803, Unsupported),
            (804, Unsupported),
            (900, Capture),
            (901, Capture),
            (902, Capture),
            (903, Capture),
            (904, Capture),
            (905, Capture),
            (906, Capture),
            (907, Capture),
            (908, Capture),
            (909, Vendor),
            (911, DeviceLost),
            (999, Vendor),
        ];
        check(&CUDA, expected);
        check(
            &CUBLAS,
            &[
                (1, InvalidState),
                (3, OutOfMemory),
                (7, InvalidArgument),
                (8, Unsupported),
                (11, Vendor),
                (13, Vendor),
                (14, Vendor),
                (15, Unsupported),
                (16, Unsupported),
            ],
        );
    }

    /// Checks that the table has exactly the expected rows, and that each error keeps its code.
    fn check(codes: &Codes, expected: &[(i32, ErrorKind)]) {
        for &(code, kind) in expected {
            let error = codes.error("test", code);
            assert_eq!((error.kind(), error.code()), (kind, Some(i64::from(code))), "{error}");
            let row = codes.find(code).unwrap();
            assert!(error.message().contains(row.name), "{error}");
        }
        let unexpected: Vec<_> =
            codes.rows.iter().filter(|row| !expected.iter().any(|(code, _)| *code == row.code)).collect();
        assert!(unexpected.is_empty() && codes.rows.len() == expected.len(), "{unexpected:?}");
    }

    #[test]
    fn a_code_of_a_newer_driver_is_told_by_its_number() {
        let error = CUDA.error("test", 921);
        assert_eq!((error.kind(), error.code()), (ErrorKind::Vendor, Some(921)));
    }
}
