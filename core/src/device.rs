//! [`Device`]: one device of a runtime.

use std::fmt;

use crate::buffer::DeviceBuffer;
use crate::capture::thread::refuse_in_capture;
use crate::ledger::BufferStatistics;
use crate::runtime::Runtime;
use crate::services::lacks_transport;
use crate::stream::Stream;
use highwater_hal::{
    BlasKind, Capabilities, DeviceInfo, DeviceMemoryKind, Element, Error, ErrorKind, MemoryInfo, Result, StreamId,
    StreamOptions, Transport, display_foreign,
};

/// One device of a runtime. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Device {
    runtime: Runtime,
    ordinal: u32,
}

/// `device 0 (NVIDIA H200)`.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} ({})", self.ordinal, display_foreign(&self.info().name))
    }
}

impl Runtime {
    /// Returns the device with this ordinal, counted from 0.
    ///
    /// # Errors
    /// `InvalidArgument` if there are fewer devices.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        if self.inner.devices.get(ordinal as usize).is_none() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "device",
                format!("there is no device {ordinal}; the backend has {}", self.inner.devices.len()),
            )
            .with_hint("ordinals count from 0"));
        }
        Ok(Device { runtime: self.clone(), ordinal })
    }
}

impl Device {
    /// Returns a device that the runtime has.
    pub(crate) fn of(runtime: &Runtime, ordinal: u32) -> Self {
        Self { runtime: runtime.clone(), ordinal }
    }

    /// Returns the ordinal within this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the runtime of the device.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Returns the description of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.runtime.inner.device(self.ordinal).info
    }

    /// Returns the abilities and facts of the device.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.runtime.inner.device(self.ordinal).capabilities
    }

    /// Returns free and total memory, in bytes.
    ///
    /// # Errors
    /// The backend's error.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        self.runtime.inner.check("memory_info")?;
        self.runtime.inner.backend.memory_info(self.ordinal)
    }

    /// Returns the memory on this device of buffers that no stream allocated: those of [`Device::allocate`] and
    /// [`Device::allocate_shared`]. [`Statistics::buffers`](crate::Statistics::buffers) is the sum over the devices.
    #[must_use]
    pub fn buffers(&self) -> BufferStatistics {
        let inner = &self.runtime.inner;
        if inner.generation.is_current() { inner.ledger.buffers(self.ordinal) } else { BufferStatistics::default() }
    }

    /// Makes BLAS handles and workspaces until `count` of each are idle, so that this many threads or streams find them: before
    /// a capture, which cannot create them, or before the first request. `count` is the number of threads for handles, and of
    /// streams for workspaces; use the larger one. [`Runtime::trim`] destroys those that nothing has taken.
    ///
    /// ```
    /// use highwater_core::Runtime;
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let device = runtime.device(0)?;
    /// device.warm(4)?;
    /// let stream = device.create_stream()?;
    /// drop(stream.blas()?); // creates nothing
    /// assert_eq!(runtime.statistics().blas_handles.created, 4);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Capture` in a thread inside a capture, or if a runtime captures on a device that cannot create handles meanwhile; else
    /// the backend's error. What was made before the error stays.
    pub fn warm(&self, count: usize) -> Result<()> {
        self.warm_kind(BlasKind::Blas, count)
    }

    /// Makes Lt handles and workspaces as [`warm`](Self::warm) does. Workspaces that are large enough count for both.
    ///
    /// # Errors
    /// `Unsupported` where `lt_plans` is false; else as [`warm`](Self::warm).
    pub fn warm_lt(&self, count: usize) -> Result<()> {
        self.warm_kind(BlasKind::Lt, count)
    }

    fn warm_kind(&self, kind: BlasKind, count: usize) -> Result<()> {
        let inner = &self.runtime.inner;
        inner.check("warm")?;
        refuse_in_capture("warm")?;
        inner.handles.warm(self.ordinal, kind, count)?;
        inner.workspaces.warm(self.ordinal, inner.device(self.ordinal).workspace_bytes(kind), count)
    }

    /// Creates a stream of normal priority.
    ///
    /// # Errors
    /// `Capture` in a thread inside a capture; else the backend's error.
    pub fn create_stream(&self) -> Result<Stream> {
        self.create_stream_with(&StreamOptions::new())
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// `Unsupported` for a priority other than normal if `stream_priority` is false; `Capture` in a thread inside a capture;
    /// else the backend's error.
    pub fn create_stream_with(&self, options: &StreamOptions) -> Result<Stream> {
        let inner = &self.runtime.inner;
        inner.check("create_stream")?;
        refuse_in_capture("create_stream")?;
        if options.priority != highwater_hal::StreamPriority::Normal && !self.capabilities().stream_priority {
            return Err(Error::lacks("create_stream", "stream_priority"));
        }
        Ok(Stream::new(self.runtime.clone(), inner.backend.create_stream(self.ordinal, options)?, true))
    }

    /// Returns the vendor's legacy default stream.
    ///
    /// # Errors
    /// `Unsupported` if `legacy_default_stream` is false.
    pub fn legacy_default_stream(&self) -> Result<Stream> {
        if !self.capabilities().legacy_default_stream {
            return Err(Error::lacks("legacy_default_stream", "legacy_default_stream"));
        }
        Ok(Stream::legacy_default(self.runtime.clone(), self.ordinal))
    }

    /// Returns the vendor's default stream of the calling thread. Only this thread can use it. In others its calls
    /// return `InvalidState`, because the vendor's handle names another stream there. Any thread may drop it and the
    /// buffers that it used.
    ///
    /// Each call records an event on the stream, so the stream is slower than others. It takes part in no capture and
    /// allocates no stream-ordered memory.
    ///
    /// # Errors
    /// `Unsupported` if `per_thread_default_stream` is false; else the error of recording the event.
    pub fn per_thread_default_stream(&self) -> Result<Stream> {
        self.runtime.inner.check("per_thread_default_stream")?;
        if !self.capabilities().per_thread_default_stream {
            return Err(Error::lacks("per_thread_default_stream", "per_thread_default_stream"));
        }
        Stream::per_thread_default(self.runtime.clone(), self.ordinal)
    }

    /// Wraps a stream that other code made and keeps. For the vendor's handle of a default stream (1 and 2 on CUDA, 0
    /// and 2 on HIP), returns that stream, as [`Device::legacy_default_stream`] and
    /// [`Device::per_thread_default_stream`] do.
    ///
    /// # Errors
    /// `Unsupported` if `foreign_objects` is false; else the backend's error. `InvalidArgument` for CUDA's 0: the
    /// compile options of the code that uses it decide which default stream it names. `WrongDevice` for a stream of another
    /// device. The message then has the ordinal and the UUID of both.
    ///
    /// # Safety
    /// The caller must pass a live stream of this device. The caller must keep it alive until this stream and every
    /// buffer used on it have been dropped. Default streams always stay alive.
    pub unsafe fn stream_from_raw(&self, raw: u64) -> Result<Stream> {
        // SAFETY: The caller keeps the stream.
        unsafe { self.adopt_stream(raw, ()) }
    }

    /// As [`Device::stream_from_raw`], with an object that keeps the stream alive, such as a reference of the library that made
    /// it. The object is dropped once nothing uses the stream. That may happen in any thread. A call that fails drops it at once,
    /// and so does a call that returns a default stream. In a forked child and once the process exits, it is leaked.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use highwater_core::{Backend, Runtime, StreamId, StreamOptions};
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # struct TheirStream(Arc<MockGpu>, StreamId);
    /// # impl TheirStream {
    /// #     fn raw(&self) -> highwater_core::Result<u64> { self.0.raw_stream(self.1) }
    /// # }
    /// # impl Drop for TheirStream {
    /// #     fn drop(&mut self) { self.0.destroy_stream(self.1).unwrap(); }
    /// # }
    /// # let gpu = MockGpu::open(MockOptions::new())?;
    /// # let runtime = Runtime::new(gpu.clone())?;
    /// # let theirs = Arc::new(TheirStream(gpu.clone(), gpu.create_stream(0, &StreamOptions::new())?));
    /// let device = runtime.device(0)?;
    /// // SAFETY: the stream is of this device, and the reference keeps it.
    /// let stream = unsafe { device.adopt_stream(theirs.raw()?, Arc::clone(&theirs))? };
    /// drop(theirs); // `stream` still works
    /// assert_eq!(stream.download(&stream.upload(&[1_u8])?)?, [1]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Device::stream_from_raw`].
    ///
    /// # Safety
    /// The caller must pass a stream of this device that stays alive until `keep_alive` is dropped. The drop of `keep_alive` must
    /// be sound in any thread.
    pub unsafe fn adopt_stream(&self, raw: u64, keep_alive: impl Send + Sync + 'static) -> Result<Stream> {
        const OPERATION: &str = "stream_from_raw";
        let inner = &self.runtime.inner;
        inner.check(OPERATION)?;
        let capabilities = self.capabilities();
        if !capabilities.foreign_objects {
            return Err(Error::lacks(OPERATION, "foreign_objects"));
        }
        let tag = inner.backend.identity().tag;
        let is_handle_of = |id| inner.backend.raw_stream(id).map(|handle| handle == raw);
        if capabilities.legacy_default_stream && is_handle_of(StreamId::legacy_default(tag, self.ordinal))? {
            return self.legacy_default_stream();
        }
        if capabilities.per_thread_default_stream && is_handle_of(StreamId::per_thread_default(tag, self.ordinal))? {
            return self.per_thread_default_stream();
        }
        if raw == 0 {
            let message = "0 names the legacy or the per-thread default stream, depending on compile options";
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint("call `legacy_default_stream` or `per_thread_default_stream`, whichever that code uses"));
        }
        // SAFETY: the caller keeps the promise that the backend requires.
        let id = unsafe { inner.backend.stream_from_raw(self.ordinal, raw) };
        let id = id.map_err(|error| self.place_of_stream(OPERATION, raw, error))?;
        Ok(Stream::foreign(self.runtime.clone(), id, keep_alive))
    }

    /// Allocates device memory for `len` values of `T`, usable from every stream. The contents are unspecified.
    ///
    /// # Errors
    /// - `OutOfMemory`: live buffers leave too little (returns at once), or the device has no more. In the second case, the
    ///   call first waits for the pools' memory and frees it.
    /// - `InvalidArgument`: the size does not fit the address space, or `T` is zero-sized.
    /// - `Capture`: this thread is inside a capture.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new(self.runtime.clone(), self.ordinal, len, DeviceMemoryKind::Plain)
    }

    /// Allocates device memory for `len` values of `T` that other processes can open, by the best transport of the device. The
    /// contents are unspecified.
    ///
    /// # Errors
    /// `Unsupported` if the device cannot share memory; else the errors of [`Device::allocate`].
    pub fn allocate_shared<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let transports = self.capabilities().ipc_transports;
        let best = [Transport::Descriptor, Transport::Legacy, Transport::Fabric];
        let best = best.into_iter().find(|transport| transports.contains(*transport));
        let best = best.ok_or_else(|| Error::lacks("allocate_shared", "ipc_transports"))?;
        self.allocate_shared_by(len, best)
    }

    /// Allocates device memory that other processes can open by this transport.
    ///
    /// # Errors
    /// `Unsupported` if the device lacks the transport; else the errors of [`Device::allocate`].
    pub fn allocate_shared_by<T: Element>(&self, len: usize, transport: Transport) -> Result<DeviceBuffer<T>> {
        let capabilities = self.capabilities();
        if !capabilities.shareable_memory {
            return Err(Error::lacks("allocate_shared", "shareable_memory"));
        }
        if !capabilities.ipc_transports.contains(transport) {
            return Err(lacks_transport("allocate_shared", transport));
        }
        DeviceBuffer::new(self.runtime.clone(), self.ordinal, len, DeviceMemoryKind::Shareable(transport))
    }

    /// Waits for every stream of the device.
    ///
    /// # Errors
    /// `Capture` if any runtime captures on a stream of the device; else the backend's error, or an error of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        let inner = &self.runtime.inner;
        inner.check("synchronize_device")?;
        let Some(_quiet) = inner.device(self.ordinal).capture_gate.quiet() else {
            return Err(Error::new(
                ErrorKind::Capture,
                "synchronize_device",
                "a stream of the device takes part in a capture, which waiting for the device would lose",
            )
            .with_hint("wait for the streams that matter, or after the capture; the capture goes on"));
        };
        inner.backend.synchronize_device(self.ordinal)
    }
}
