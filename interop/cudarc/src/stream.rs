//! [`JoinedStream`]: a stream of cudarc that is also a stream of Highwater.

use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};
use highwater_core::{Error, ErrorKind, Result, Runtime, Stream};

/// Turns an error of cudarc into one of Highwater.
pub(crate) fn driver_error(operation: &'static str, error: DriverError) -> Error {
    Error::new(ErrorKind::Vendor, operation, format!("cudarc: {error:?}")).with_code(i64::from(error.0 as u32))
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for highwater_core::Stream {}
}

/// Adds [`Stream::of`](StreamExt::of) to [`Stream`].
pub trait StreamExt: sealed::Sealed {
    /// Makes a Highwater stream of a stream of cudarc. Both enqueue on one stream, in the order of the calls.
    ///
    /// `stream` may be any stream of a primary context: one that cudarc created, `default_stream()` or `per_thread_stream()`. The result
    /// keeps the `Arc` until nothing uses the stream. That of a per-thread stream works only in the calling thread. The device is the
    /// one with the UUID of cudarc's context, so the two ordinals may differ.
    ///
    /// Call it once for each stream and keep the result. Two results of one stream are two streams to Highwater.
    ///
    /// # Errors
    /// - `WrongDevice`: the runtime has no device with this UUID. The message lists those that it has.
    /// - `InvalidArgument`: the context is not the device's primary context, or the runtime is not of CUDA.
    /// - `Vendor`: cudarc returned an error, or had stored one of an earlier drop.
    /// - Otherwise the error of `Device::stream_from_raw`.
    fn of(runtime: &Runtime, stream: &Arc<CudaStream>) -> Result<JoinedStream>;
}

impl StreamExt for Stream {
    fn of(runtime: &Runtime, stream: &Arc<CudaStream>) -> Result<JoinedStream> {
        const OPERATION: &str = "Stream::of";
        let context = stream.context();
        let identity = runtime.identity();
        if identity.name != "cuda" {
            let message = format!("the runtime is of the backend `{}`, expected `cuda`", identity.name);
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint("open the runtime with the CUDA backend"));
        }
        if !context.is_primary() {
            let message = "the stream is of a context that is not the device's primary one";
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint("make the stream with a context of `CudaContext::new`"));
        }
        let uuid = context.uuid().map_err(|error| driver_error(OPERATION, error))?.bytes.map(|byte| byte as u8);
        let devices = (0..runtime.device_count()).map(|ordinal| runtime.device(ordinal)).collect::<Result<Vec<_>>>()?;
        let Some(device) = devices.iter().find(|device| device.info().uuid == uuid) else {
            let written = |uuid: &[u8; 16]| uuid.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            let has =
                devices.iter().map(|device| format!("{} (UUID {})", device.ordinal(), written(&device.info().uuid)));
            let message = format!(
                "the stream is of cudarc's device {} (UUID {}), the runtime has the devices {}",
                context.ordinal(),
                written(&uuid),
                has.collect::<Vec<_>>().join(", ")
            );
            return Err(Error::new(ErrorKind::WrongDevice, OPERATION, message)
                .with_hint("open the runtime with the device of the stream"));
        };
        let theirs = Arc::clone(stream);
        // cudarc calls the driver's functions without a suffix, so its null handle names the legacy default stream.
        let stream = match theirs.cu_stream().addr() {
            0 => device.legacy_default_stream()?,
            // SAFETY: The stream is of this device, and the `Arc` keeps it. Its drop is sound in any thread.
            handle => unsafe { device.adopt_stream(handle as u64, Arc::clone(&theirs))? },
        };
        Ok(JoinedStream { stream, theirs })
    }
}

/// A stream of cudarc and of Highwater: [`Stream::of`](StreamExt::of). It derefs to [`Stream`].
#[derive(Debug, Clone)]
pub struct JoinedStream {
    stream: Stream,
    theirs: Arc<CudaStream>,
}

impl Deref for JoinedStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl JoinedStream {
    /// Returns cudarc's stream.
    #[must_use]
    pub fn cuda_stream(&self) -> &Arc<CudaStream> {
        &self.theirs
    }

    /// Returns whether this is a per-thread default stream, which other threads cannot use.
    pub(crate) fn is_per_thread(&self) -> bool {
        self.stream.id().is_per_thread_default()
    }
}
