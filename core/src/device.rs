//! [`Device`]: one device of a runtime.

use crate::backend::{DeviceInfo, StreamOptions};
use crate::buffer::DeviceBuffer;
use crate::capability::Capabilities;
use crate::error::{Error, Result};
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
    /// `Unsupported` for another priority than normal where `stream_priority` is false; else what the backend gives.
    pub fn create_stream_with(&self, options: &StreamOptions) -> Result<Stream> {
        let inner = &self.runtime.inner;
        inner.check("create_stream")?;
        if options.priority != crate::backend::StreamPriority::Normal && !self.capabilities().stream_priority {
            return Err(Error::lacks("create_stream", "stream_priority"));
        }
        Ok(Stream::new(self.runtime.clone(), inner.backend.create_stream(self.ordinal, options)?, true))
    }

    /// The vendor's legacy default stream. (The per-thread one is not offered: the thread that drops a buffer could not mark
    /// the point up to which another thread's stream uses it.)
    ///
    /// # Errors
    /// `Unsupported` where `legacy_default_stream` is false.
    pub fn legacy_default_stream(&self) -> Result<Stream> {
        if !self.capabilities().legacy_default_stream {
            return Err(Error::lacks("legacy_default_stream", "legacy_default_stream"));
        }
        Ok(Stream::legacy_default(self.runtime.clone(), self.ordinal))
    }

    /// Wraps a stream that other code made and keeps.
    ///
    /// # Errors
    /// `Unsupported` where `foreign_objects` is false; else what the backend gives.
    ///
    /// # Safety
    /// `raw` is a live stream of this device, and stays so until this stream and every buffer that was used on it have
    /// been dropped.
    pub unsafe fn stream_from_raw(&self, raw: u64) -> Result<Stream> {
        if !self.capabilities().foreign_objects {
            return Err(Error::lacks("stream_from_raw", "foreign_objects"));
        }
        // SAFETY: the caller's promise is the one that the backend asks for.
        let id = unsafe { self.runtime.inner.backend.stream_from_raw(self.ordinal, raw)? };
        Ok(Stream::new(self.runtime.clone(), id, true))
    }

    /// Allocates device memory for `len` values of `T`, usable from every stream. The contents are unspecified.
    ///
    /// # Errors
    /// `OutOfMemory` when the device has no more, also after what the pools keep was given back; `InvalidArgument` when
    /// the size does not fit the address space.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new(self.runtime.clone(), self.ordinal, len, DeviceMemoryKind::Plain)
    }

    /// Waits for every stream of the device.
    ///
    /// # Errors
    /// What the backend gives; an error of earlier work may show up here.
    pub fn synchronize(&self) -> Result<()> {
        self.runtime.inner.check("synchronize_device")?;
        self.runtime.inner.backend.synchronize_device(self.ordinal)
    }
}
