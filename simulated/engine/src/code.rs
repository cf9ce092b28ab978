//! Result codes. CUDA's numbers; HIP has the same ones for what both have.

use highwater_hal::{Error, ErrorKind};

/// Why a call failed: a result code that is not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

/// What a call gives, or why it failed.
pub type Answer<T> = Result<T, Code>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        impl Code {
            $($(#[$doc])* pub const $name: Self = Self($value);)*
        }

        /// Number, name and text of every code that there is, with the zero byte that C wants.
        const NAMES: &[(u32, &str, &str)] = &[
            (0, "CUDA_SUCCESS\0", "no error\0"),
            $(($value, concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*
        ];
    };
}

codes! {
    /// An argument is not what it has to be.
    INVALID_VALUE = 1, "invalid argument";
    /// Device or host memory is used up.
    OUT_OF_MEMORY = 2, "out of memory";
    /// `cuInit` was not called, or the process was forked after it.
    NOT_INITIALIZED = 3, "initialization error";
    /// The process is exiting.
    DEINITIALIZED = 4, "driver shutting down";
    /// The library is only there to be linked to.
    STUB_LIBRARY = 34, "CUDA driver is a stub library";
    /// There is no device.
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    /// There is no such device.
    INVALID_DEVICE = 101, "invalid device ordinal";
    /// No context is current, or it is none.
    INVALID_CONTEXT = 201, "invalid device context";
    /// The devices cannot reach each other's memory.
    PEER_ACCESS_UNSUPPORTED = 217, "peer access is not supported between these two devices";
    /// The system refused something.
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    /// A handle stands for nothing, or for something that cannot be used so.
    INVALID_HANDLE = 400, "invalid resource handle";
    /// The object is not in the state that the call needs.
    ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    /// A symbol is not there.
    NOT_FOUND = 500, "named symbol not found";
    /// Work is not done yet. No failure.
    NOT_READY = 600, "device not ready";
    /// A kernel used memory that it cannot reach. The context is lost.
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    /// Peer access was enabled before.
    PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled";
    /// Peer access was not enabled.
    PEER_ACCESS_NOT_ENABLED = 705, "peer access has not been enabled";
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    /// A part of the host memory is registered.
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    /// The host memory is not registered.
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    /// A kernel failed. The context is lost.
    LAUNCH_FAILED = 719, "unspecified launch failure";
    /// The system does not permit it.
    NOT_PERMITTED = 800, "operation not permitted";
    /// The device cannot do it.
    NOT_SUPPORTED = 801, "operation not supported";
    /// The call cannot be made while a capture is open.
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    /// The capture was lost by an earlier call.
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    /// Two captures would become one.
    STREAM_CAPTURE_MERGE = 902, "operation would result in a merge of separate capture sequences";
    /// The capture did not begin on this stream.
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not ended in the same stream as it began";
    /// A stream that joined was not waited for.
    STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    /// A dependency would cross the border of a capture.
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    /// The legacy default stream would take part in a capture.
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    /// The event was recorded in a capture last.
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    /// A capture ends on the thread that it began on.
    STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
    /// Something that should not have happened.
    UNKNOWN = 999, "unknown error";
}

impl Code {
    /// Name and text of a result code, each ending with a zero byte; `None` for a number that is none.
    #[must_use]
    pub fn describe(number: u32) -> Option<(&'static str, &'static str)> {
        NAMES.iter().find(|(code, ..)| *code == number).map(|&(_, name, text)| (name, text))
    }
}

/// What a failure of the mock means to a program that speaks CUDA.
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
