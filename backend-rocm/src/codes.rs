//! The meaning of HIP's and hipBLAS's codes.

use highwater_driver::{Code, Codes};
use highwater_hal::ErrorKind;

/// Creates rows, each with the code, the vendor's name, the kind and the hint.
macro_rules! table {
    ($($code:literal $name:ident $kind:ident $hint:expr;)*) => {
        &[$(Code::new($code, stringify!($name), ErrorKind::$kind, $hint)),*]
    };
}

const LOST: &str = "the device is lost for the whole process; end the process, and look for the cause in earlier work";
const CAPTURED: &str = "end the capture and begin again; make forbidden calls before or after the capture";
const INVISIBLE: &str =
    "no device is visible; check `rocminfo`, the permissions of /dev/kfd, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES";

/// The codes of the runtime.
pub(crate) static HIP: Codes = Codes {
    library: "HIP",
    rows: table! {
        1 hipErrorInvalidValue InvalidArgument "check sizes, addresses and flags of the call";
        2 hipErrorOutOfMemory OutOfMemory "free memory, request fewer bytes, or use another device";
        3 hipErrorNotInitialized InvalidState "HIP is not initialized in this process; after a fork, start a new program instead";
        4 hipErrorDeinitialized ShuttingDown "the runtime has ended with the process";
        17 hipErrorInvalidDevicePointer InvalidPointer "pass an address that this device allocated";
        21 hipErrorInvalidMemcpyDirection InvalidArgument "";
        35 hipErrorInsufficientDriver DeviceMissing "the kernel's driver (amdgpu) is missing or older than this HIP; install the driver of the same release";
        52 hipErrorMissingConfiguration InvalidState "";
        100 hipErrorNoDevice DeviceMissing INVISIBLE;
        101 hipErrorInvalidDevice InvalidArgument "pass an ordinal below `device_count`";
        201 hipErrorInvalidContext InvalidState "the object belongs to another device, or to this process instead of another one";
        205 hipErrorMapFailed Vendor "";
        209 hipErrorNoBinaryForGpu Unsupported "this release of ROCm has no code for the device's architecture";
        214 hipErrorECCNotCorrectable DeviceLost LOST;
        217 hipErrorPeerAccessUnsupported Unsupported "copy through the host, or use devices with peer access";
        303 hipErrorSharedObjectInitFailed Vendor "";
        304 hipErrorOperatingSystem OperatingSystem "read the system's log";
        400 hipErrorInvalidHandle InvalidHandle "the object was destroyed, or belongs to another device";
        401 hipErrorIllegalState InvalidState "the object's state does not allow this call";
        500 hipErrorNotFound Vendor "";
        600 hipErrorNotReady InvalidState "wait for the work to finish first";
        700 hipErrorIllegalAddress DeviceLost LOST;
        701 hipErrorLaunchOutOfResources OutOfMemory "";
        702 hipErrorLaunchTimeOut DeviceLost LOST;
        704 hipErrorPeerAccessAlreadyEnabled InvalidState "";
        705 hipErrorPeerAccessNotEnabled InvalidState "";
        709 hipErrorContextIsDestroyed InvalidHandle "foreign code destroyed the object";
        710 hipErrorAssert DeviceLost LOST;
        712 hipErrorHostMemoryAlreadyRegistered InvalidArgument "register each range once, and no memory that was allocated page-locked";
        713 hipErrorHostMemoryNotRegistered InvalidPointer "pass the start of a registered range";
        719 hipErrorLaunchFailure DeviceLost LOST;
        801 hipErrorNotSupported Unsupported "the device or its runtime does not support this call";
        900 hipErrorStreamCaptureUnsupported Capture CAPTURED;
        901 hipErrorStreamCaptureInvalidated Capture CAPTURED;
        902 hipErrorStreamCaptureMerge Capture CAPTURED;
        903 hipErrorStreamCaptureUnmatched Capture CAPTURED;
        904 hipErrorStreamCaptureUnjoined Capture "make the first stream wait for every stream that joined, then end the capture";
        905 hipErrorStreamCaptureIsolation Capture "a capture cannot wait for earlier work, and other streams cannot wait for work inside it";
        906 hipErrorStreamCaptureImplicit Capture "the legacy default stream cannot take part in a capture";
        907 hipErrorCapturedEvent Capture "wait for the event only in the capture that recorded it";
        908 hipErrorStreamCaptureWrongThread Capture "end the capture on the thread that began it";
        999 hipErrorUnknown Vendor "";
    },
};

/// The codes of hipBLAS 2 and 3.
pub(crate) static HIPBLAS: Codes = Codes { library: "hipBLAS", rows: STATUS_ROWS };
/// hipBLASLt has the status codes of hipBLAS.
pub(crate) static HIPBLASLT: Codes = Codes { library: "hipBLASLt", rows: STATUS_ROWS };

const STATUS_ROWS: &[Code] = table! {
        1 HIPBLAS_STATUS_NOT_INITIALIZED InvalidState "the handle or the device is lost";
        2 HIPBLAS_STATUS_ALLOC_FAILED OutOfMemory "free device memory, or use fewer handles";
        3 HIPBLAS_STATUS_INVALID_VALUE InvalidArgument "check sizes, leading dimensions and addresses";
        4 HIPBLAS_STATUS_MAPPING_ERROR Vendor "";
        5 HIPBLAS_STATUS_EXECUTION_FAILED Vendor "an earlier error of the device is the usual cause; synchronize after each call to find it";
        6 HIPBLAS_STATUS_INTERNAL_ERROR Vendor "an earlier error of the device or exhausted memory is the usual cause";
        7 HIPBLAS_STATUS_NOT_SUPPORTED Unsupported "this combination of types, sizes and alignments has no kernel";
        8 HIPBLAS_STATUS_ARCH_MISMATCH Unsupported "the device is too old for this operation";
        9 HIPBLAS_STATUS_HANDLE_IS_NULLPTR InvalidHandle "";
        10 HIPBLAS_STATUS_INVALID_ENUM InvalidArgument "use the hipBLAS of the same ROCm release as HIP";
        11 HIPBLAS_STATUS_UNKNOWN Vendor "";
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the table has exactly the expected rows, and that each error keeps its code and name.
    fn hold(codes: &Codes, expected: &[(i32, ErrorKind)]) {
        let rows: Vec<(i32, ErrorKind)> = codes.rows.iter().map(|row| (row.code, row.kind)).collect();
        assert_eq!(rows, expected);
        for row in codes.rows {
            let error = codes.error("test", row.code);
            assert_eq!((error.kind(), error.code(), error.hint()), (row.kind, Some(i64::from(row.code)), row.hint));
            assert!(error.message().contains(row.name), "{error}");
        }
    }

    #[test]
    fn what_the_runtimes_codes_mean_is_what_a_program_can_act_on() {
        use ErrorKind::*;
        #[rustfmt::skip]
        hold(&HIP, &[
            (1, InvalidArgument), (2, OutOfMemory), (3, InvalidState), (4, ShuttingDown), (17, InvalidPointer),
            (21, InvalidArgument), (35, DeviceMissing), (52, InvalidState), (100, DeviceMissing), (101, InvalidArgument),
            (201, InvalidState), (205, Vendor), (209, Unsupported), (214, DeviceLost), (217, Unsupported), (303, Vendor),
            (304, OperatingSystem), (400, InvalidHandle), (401, InvalidState), (500, Vendor), (600, InvalidState),
            (700, DeviceLost), (701, OutOfMemory), (702, DeviceLost), (704, InvalidState), (705, InvalidState),
            (709, InvalidHandle), (710, DeviceLost), (712, InvalidArgument), (713, InvalidPointer), (719, DeviceLost),
            (801, Unsupported), (900, Capture), (901, Capture), (902, Capture), (903, Capture), (904, Capture),
            (905, Capture), (906, Capture), (907, Capture), (908, Capture), (999, Vendor),
        ]);
    }

    #[test]
    fn what_the_codes_of_hipblas_mean() {
        use ErrorKind::*;
        #[rustfmt::skip]
        hold(&HIPBLAS, &[
            (1, InvalidState), (2, OutOfMemory), (3, InvalidArgument), (4, Vendor), (5, Vendor), (6, Vendor), (7, Unsupported),
            (8, Unsupported), (9, InvalidHandle), (10, InvalidArgument), (11, Vendor),
        ]);
    }

    #[test]
    fn codes_that_nobody_knows_are_told_by_their_numbers() {
        for (codes, code) in [(&HIP, 1052), (&HIPBLAS, 12)] {
            let error = codes.error("test", code);
            assert_eq!((error.kind(), error.code()), (ErrorKind::Vendor, Some(i64::from(code))));
        }
    }
}
