//! [`Device`]: one device of a runtime.

use crate::backend::{DeviceInfo, StreamOptions};
use crate::buffer::DeviceBuffer;
use crate::capability::Capabilities;
use crate::capture::refuse_in_capture;
use crate::error::{Error, ErrorKind, Result};
use crate::id::StreamId;
use crate::ipc::Transport;
use crate::memory::{DeviceMemoryKind, MemoryInfo};
use crate::runtime::Runtime;
use crate::scalar::Element;
use crate::stream::Stream;

/// One device of a runtime. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Device {
    runtime: Runtime,
    ordinal: u32,
}

impl Device {
    pub(crate) fn new(runtime: Runtime, ordinal: u32) -> Self {
        Self { runtime, ordinal }
    }

    /// Ordinal within this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The runtime that the device belongs to.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.runtime.inner.device(self.ordinal).info
    }

    /// What the device can do.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.runtime.inner.device(self.ordinal).capabilities
    }

    /// Free and total memory, in bytes.
    ///
    /// # Errors
    /// What the backend gives.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        self.runtime.inner.check("memory_info")?;
        self.runtime.inner.backend.memory_info(self.ordinal)
    }

    /// Makes a stream of normal priority.
    ///
    /// # Errors
    /// What the backend gives.
    pub fn create_stream(&self) -> Result<Stream> {
        self.create_stream_with(&StreamOptions::new())
    }

    /// Makes a stream.
    ///
    /// # Errors
    /// `Unsupported` for another priority than normal where `stream_priority` is false; `Capture` in a thread that is inside
    /// a capture; else what the backend gives.
    pub fn create_stream_with(&self, options: &StreamOptions) -> Result<Stream> {
        let inner = &self.runtime.inner;
        inner.check("create_stream")?;
        refuse_in_capture("create_stream")?;
        if options.priority != crate::backend::StreamPriority::Normal && !self.capabilities().stream_priority {
            return Err(Error::lacks("create_stream", "stream_priority"));
        }
        Ok(Stream::new(self.runtime.clone(), inner.backend.create_stream(self.ordinal, options)?, true))
    }

    /// The vendor's legacy default stream.
    ///
    /// # Errors
    /// `Unsupported` where `legacy_default_stream` is false.
    pub fn legacy_default_stream(&self) -> Result<Stream> {
        if !self.capabilities().legacy_default_stream {
            return Err(Error::lacks("legacy_default_stream", "legacy_default_stream"));
        }
        Ok(Stream::legacy_default(self.runtime.clone(), self.ordinal))
    }

    /// The vendor's default stream of the calling thread. Only this thread can use it: in others its calls give `InvalidState`,
    /// because the vendor's handle names another stream there. It may be dropped anywhere, and so may the buffers that it used.
    ///
    /// Each call leaves a mark on the stream, so it is slower than others, and it takes part in no capture and allocates no
    /// stream-ordered memory.
    ///
    /// # Errors
    /// `Unsupported` where `per_thread_default_stream` is false; else what marking the stream gives.
    pub fn per_thread_default_stream(&self) -> Result<Stream> {
        self.runtime.inner.check("per_thread_default_stream")?;
        if !self.capabilities().per_thread_default_stream {
            return Err(Error::lacks("per_thread_default_stream", "per_thread_default_stream"));
        }
        Stream::per_thread_default(self.runtime.clone(), self.ordinal)
    }

    /// Wraps a stream that other code made and keeps. The vendor's handle of a default stream gives that stream, as
    /// [`Device::legacy_default_stream`] and [`Device::per_thread_default_stream`] do: 1 and 2 for CUDA, 0 and 2 for HIP.
    ///
    /// # Errors
    /// `Unsupported` where `foreign_objects` is false; `InvalidArgument` for CUDA's 0, which names the one default stream or the
    /// other by how the code that uses it was compiled; else what the backend gives.
    ///
    /// # Safety
    /// `raw` is a live stream of this device, and stays so until this stream and every buffer that was used on it have
    /// been dropped. This does not concern default streams.
    pub unsafe fn stream_from_raw(&self, raw: u64) -> Result<Stream> {
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
            let message =
                "0 is no handle of one stream: it names a default stream by how the code that uses it was compiled";
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message)
                .with_hint("call `legacy_default_stream` or `per_thread_default_stream`, whichever that code means"));
        }
        // SAFETY: the caller's promise is the one that the backend asks for.
        let id = unsafe { inner.backend.stream_from_raw(self.ordinal, raw)? };
        Ok(Stream::foreign(self.runtime.clone(), id))
    }

    /// Allocates device memory for `len` values of `T`, usable from every stream. The contents are unspecified.
    ///
    /// # Errors
    /// `OutOfMemory` when the device has no more, also after what the pools keep was given back, for which it waits; at once
    /// when live buffers leave too little; `InvalidArgument` when the size does not fit the address space; `Capture` in a thread that is inside a capture.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new(self.runtime.clone(), self.ordinal, len, DeviceMemoryKind::Plain)
    }

    /// Allocates device memory for `len` values of `T` that other processes can open, by the best transport that the device
    /// has. The contents are unspecified.
    ///
    /// # Errors
    /// `Unsupported` where the device shares no memory; else as [`Device::allocate`].
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
    /// `Unsupported` where the device does not have the transport; else as [`Device::allocate`].
    pub fn allocate_shared_by<T: Element>(&self, len: usize, transport: Transport) -> Result<DeviceBuffer<T>> {
        let capabilities = self.capabilities();
        if !capabilities.shareable_memory {
            return Err(Error::lacks("allocate_shared", "shareable_memory"));
        }
        if !capabilities.ipc_transports.contains(transport) {
            return Err(Error::lacks("allocate_shared", "ipc_transports"));
        }
        DeviceBuffer::new(self.runtime.clone(), self.ordinal, len, DeviceMemoryKind::Shareable(transport))
    }

    /// Waits for every stream of the device.
    ///
    /// # Errors
    /// `Capture` where a stream of the device takes part in a capture, also in one of another runtime; else what the backend
    /// gives, and an error of earlier work may show up here.
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
