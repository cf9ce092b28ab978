//! Result codes, in CUDA's numbers. HIP has the same number for a code that both have.

use highwater_hal::{Error, ErrorKind};

/// A result code other than 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

/// The result of a call, or its code.
pub type Answer<T> = Result<T, Code>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $hip:literal, $text:literal;)*) => {
        impl Code {
            $($(#[$doc])* pub const $name: Self = Self($value);)*
        }

        /// Number, CUDA's name, HIP's name and text of every code, each text with the zero byte of C.
        const NAMES: &[(u32, &str, &str, &str)] = &[
            (0, "CUDA_SUCCESS\0", "hipSuccess\0", "no error\0"),
            $(($value, concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($hip, "\0"), concat!($text, "\0")),)*
        ];
    };
}

codes! {
    /// An argument is invalid.
    INVALID_VALUE = 1, "hipErrorInvalidValue", "invalid argument";
    /// Device or host memory is exhausted.
    OUT_OF_MEMORY = 2, "hipErrorOutOfMemory", "out of memory";
    /// `cuInit` was not called, or the process was forked after it.
    NOT_INITIALIZED = 3, "hipErrorNotInitialized", "initialization error";
    /// The process is exiting.
    DEINITIALIZED = 4, "hipErrorDeinitialized", "driver shutting down";
    /// The library is a stub for linking. HIP has no such code, so its name is empty, here and below.
    STUB_LIBRARY = 34, "", "CUDA driver is a stub library";
    /// There is no device.
    NO_DEVICE = 100, "hipErrorNoDevice", "no CUDA-capable device is detected";
    /// There is no such device.
    INVALID_DEVICE = 101, "hipErrorInvalidDevice", "invalid device ordinal";
    /// No context is current, or the handle names none.
    INVALID_CONTEXT = 201, "hipErrorInvalidContext", "invalid device context";
    /// The devices cannot reach each other's memory.
    PEER_ACCESS_UNSUPPORTED = 217, "hipErrorPeerAccessUnsupported", "peer access is not supported between these two devices";
    /// The operating system refused a call.
    OPERATING_SYSTEM = 304, "hipErrorOperatingSystem", "OS call failed or operation not supported on this OS";
    /// A handle is unknown, or its object cannot be used so.
    INVALID_HANDLE = 400, "hipErrorInvalidHandle", "invalid resource handle";
    /// The object is not in the state that the call needs.
    ILLEGAL_STATE = 401, "hipErrorIllegalState", "the operation cannot be performed in the present state";
    /// A symbol is missing.
    NOT_FOUND = 500, "hipErrorNotFound", "named symbol not found";
    /// Work is not complete. This is not a failure.
    NOT_READY = 600, "hipErrorNotReady", "device not ready";
    /// A kernel used memory that it cannot reach. The context is lost.
    ILLEGAL_ADDRESS = 700, "hipErrorIllegalAddress", "an illegal memory access was encountered";
    /// Peer access was enabled before.
    PEER_ACCESS_ALREADY_ENABLED = 704, "hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled";
    /// Peer access was not enabled.
    PEER_ACCESS_NOT_ENABLED = 705, "hipErrorPeerAccessNotEnabled", "peer access has not been enabled";
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709, "hipErrorContextIsDestroyed", "context is destroyed";
    /// A part of the host memory is registered.
    HOST_MEMORY_ALREADY_REGISTERED = 712, "hipErrorHostMemoryAlreadyRegistered",
        "part or all of the requested memory range is already mapped";
    /// The host memory is not registered.
    HOST_MEMORY_NOT_REGISTERED = 713, "hipErrorHostMemoryNotRegistered",
        "pointer does not correspond to a registered memory region";
    /// A kernel failed. The context is lost.
    LAUNCH_FAILED = 719, "hipErrorLaunchFailure", "unspecified launch failure";
    /// The system does not permit it.
    NOT_PERMITTED = 800, "", "operation not permitted";
    /// The device cannot do it.
    NOT_SUPPORTED = 801, "hipErrorNotSupported", "operation not supported";
    /// The call cannot be made while a capture is open.
    STREAM_CAPTURE_UNSUPPORTED = 900, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing";
    /// An earlier call invalidated the capture.
    STREAM_CAPTURE_INVALIDATED = 901, "hipErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture";
    /// Two captures would become one.
    STREAM_CAPTURE_MERGE = 902, "hipErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences";
    /// The capture did not begin on this stream.
    STREAM_CAPTURE_UNMATCHED = 903, "hipErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began";
    /// A stream that joined was not waited for.
    STREAM_CAPTURE_UNJOINED = 904, "hipErrorStreamCaptureUnjoined", "capturing stream has unjoined work";
    /// A dependency would cross the border of a capture.
    STREAM_CAPTURE_ISOLATION = 905, "hipErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream";
    /// The legacy default stream would take part in a capture.
    STREAM_CAPTURE_IMPLICIT = 906, "hipErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream";
    /// The event was recorded in a capture last.
    CAPTURED_EVENT = 907, "hipErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream";
    /// A capture ends on the thread that it began on.
    STREAM_CAPTURE_WRONG_THREAD = 908, "hipErrorStreamCaptureWrongThread",
        "attempt to terminate a thread-local capture sequence from another thread";
    /// An internal failure.
    UNKNOWN = 999, "hipErrorUnknown", "unknown error";
}

impl Code {
    /// Returns CUDA's name and the text of a result code, each with a zero byte at its end; `None` for an unknown code.
    #[must_use]
    pub fn describe(number: u32) -> Option<(&'static str, &'static str)> {
        NAMES.iter().find(|(code, ..)| *code == number).map(|&(_, name, _, text)| (name, text))
    }

    /// Returns HIP's name and the text of a result code that both vendors have.
    #[must_use]
    pub fn describe_hip(number: u32) -> Option<(&'static str, &'static str)> {
        let both = NAMES.iter().find(|(code, _, name, _)| *code == number && *name != "\0");
        both.map(|&(_, _, name, text)| (name, text))
    }
}

/// Translates a failure of the mock.
impl From<Error> for Code {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::InvalidHandle | ErrorKind::WrongDevice => Self::INVALID_HANDLE,
            ErrorKind::Unsupported => Self::NOT_SUPPORTED,
            ErrorKind::OutOfMemory => Self::OUT_OF_MEMORY,
            ErrorKind::Capture => Self::STREAM_CAPTURE_UNSUPPORTED,
            ErrorKind::InvalidState => Self::ILLEGAL_STATE,
            ErrorKind::DeviceLost => Self::ILLEGAL_ADDRESS,
            ErrorKind::ShuttingDown => Self::DEINITIALIZED,
            ErrorKind::Forked => Self::NOT_INITIALIZED,
            ErrorKind::OperatingSystem => Self::OPERATING_SYSTEM,
            ErrorKind::PermissionDenied => Self::NOT_PERMITTED,
            ErrorKind::InvalidArgument | ErrorKind::InvalidPointer => Self::INVALID_VALUE,
            _ => Self::UNKNOWN,
        }
    }
}
