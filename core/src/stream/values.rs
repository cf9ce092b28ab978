//! Values: uploads, downloads, and scopes of copies into borrowed memory.

use std::fmt;

use super::Stream;
use super::copies::CopyKind;
use crate::buffer::{DeviceBuffer, DeviceSlice};
use crate::pinned::{PinnedBuffer, PinnedSliceMut};
use highwater_hal::{DeviceMemoryKind, Element, Result};

impl Stream {
    /// Returns page-locked memory on the node of the stream's device.
    fn staging<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::new(self.runtime.inner.pinned.of_device(self.device()), len)
    }

    /// Enqueues a copy of values to the device, through page-locked memory from the cache. The caller may change `values` as
    /// soon as the call returns.
    ///
    /// # Errors
    /// As [`Stream::copy_to_device`] and [`Runtime::pinned`](crate::Runtime::pinned).
    pub fn write<'d, T: Element>(&self, values: &[T], dst: impl Into<DeviceSlice<'d, T>>) -> Result<()> {
        let dst = dst.into();
        Self::check_len("write", values.len(), dst.len())?;
        let mut staging = self.staging::<T>(values.len())?;
        staging.write()?.copy_from_slice(values);
        self.copy_to_device(&staging, dst)
    }

    /// Returns a device buffer with these values, copied as by [`Stream::write`]. Work on another stream must wait for
    /// the copy: `other.wait(&stream.record()?)?`.
    ///
    /// # Errors
    /// As [`Stream::write`] and [`Device::allocate`](crate::Device::allocate).
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<DeviceBuffer<T>> {
        let buffer = DeviceBuffer::new(self.runtime.clone(), self.device(), values.len(), DeviceMemoryKind::Plain)?;
        self.write(values, &buffer)?;
        Ok(buffer)
    }

    /// Waits until all work enqueued so far has been executed, then returns the values of a device buffer.
    ///
    /// # Errors
    /// As [`Stream::copy_to_host`] and [`Runtime::pinned`](crate::Runtime::pinned); `Capture` if the stream takes part in a
    /// capture.
    pub fn download<'d, T: Element>(&self, src: impl Into<DeviceSlice<'d, T>>) -> Result<Vec<T>> {
        let src = src.into();
        self.refuse_where_recorded("download")?;
        let mut staging = self.staging::<T>(src.len())?;
        self.copy_pinned("copy_to_host", &PinnedSliceMut::from(&mut staging).0, src, CopyKind::Awaited)?;
        Ok(staging.read()?.to_vec())
    }

    /// Runs `enqueue`, which may enqueue copies into borrowed memory of any kind. Then waits for the copies and delivers the
    /// values.
    ///
    /// The device never writes the borrowed memory itself. It writes page-locked memory of the cache, which is copied after the
    /// wait. So nothing can write to memory whose borrow has ended, even after an error or a panic.
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// # let stream = runtime.device(0)?.create_stream()?;
    /// let buffer = stream.upload(&[1_u8, 2, 3, 4])?;
    /// let (mut front, mut back) = ([0; 2], [0; 2]);
    /// stream.scope(|scope| {
    ///     scope.copy_to_host(buffer.slice(0..2)?, &mut front)?;
    ///     scope.copy_to_host(buffer.slice(2..4)?, &mut back)
    /// })?;
    /// assert_eq!((front, back), ([1, 2], [3, 4]));
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// The memory stays borrowed until the scope has ended, and must outlive it:
    ///
    /// ```compile_fail,E0502
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    /// # let stream = runtime.device(0).unwrap().create_stream().unwrap();
    /// # let buffer = stream.upload(&[1_u8, 2]).unwrap();
    /// let mut values = [0; 2];
    /// stream.scope(|scope| {
    ///     scope.copy_to_host(&buffer, &mut values)?;
    ///     println!("{}", values[0]); // not delivered yet
    ///     Ok(())
    /// }).unwrap();
    /// ```
    ///
    /// ```compile_fail,E0597
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
    /// # let stream = runtime.device(0).unwrap().create_stream().unwrap();
    /// # let buffer = stream.upload(&[1_u8, 2]).unwrap();
    /// stream.scope(|scope| {
    ///     let mut values = [0; 2];
    ///     scope.copy_to_host(&buffer, &mut values)
    /// }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The error of `enqueue`, or of the wait for the copies; then nothing is delivered. `Capture` if the stream takes part in
    /// a capture.
    pub fn scope<'env, R>(&self, enqueue: impl FnOnce(&mut Scope<'_, 'env>) -> Result<R>) -> Result<R> {
        self.refuse_where_recorded("scope")?;
        let mut scope = Scope { stream: self, deliveries: Vec::new() };
        let value = enqueue(&mut scope)?;
        // Waits for all copies before it delivers the first: if one copy failed, none is delivered.
        scope.deliveries.iter().try_for_each(|delivery| delivery.wait())?;
        scope.deliveries.iter_mut().try_for_each(|delivery| delivery.deliver())?;
        Ok(value)
    }

    /// Refuses to wait for values while the stream records a capture. If a capture begins after this check, the copies fail.
    fn refuse_where_recorded(&self, operation: &'static str) -> Result<()> {
        self.backend(operation)?;
        self.core.enter_outside(operation).map(|_| ())
    }
}

/// Enqueues the copies of a [`Stream::scope`].
pub struct Scope<'s, 'env> {
    stream: &'s Stream,
    deliveries: Vec<Box<dyn Delivery + 'env>>,
}

/// One copy to borrowed memory.
trait Delivery {
    /// Waits for the copy.
    fn wait(&self) -> Result<()>;
    /// Delivers the copied values.
    fn deliver(&mut self) -> Result<()>;
}

struct Delivered<'env, T: Element> {
    staging: PinnedBuffer<T>,
    dst: &'env mut [T],
}

impl<T: Element> Delivery for Delivered<'_, T> {
    fn wait(&self) -> Result<()> {
        self.staging.read().map(|_| ())
    }

    fn deliver(&mut self) -> Result<()> {
        self.dst.copy_from_slice(self.staging.read()?);
        Ok(())
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("copies_to_host", &self.deliveries.len()).finish_non_exhaustive()
    }
}

impl<'env> Scope<'_, 'env> {
    /// Enqueues a copy of values to the device, as [`Stream::write`].
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn copy_to_device<'d, T: Element>(&mut self, src: &[T], dst: impl Into<DeviceSlice<'d, T>>) -> Result<()> {
        self.stream.write(src, dst)
    }

    /// Enqueues a copy of device memory, which is delivered to `dst` at the end of the scope.
    ///
    /// # Errors
    /// As [`Stream::copy_to_host`] and [`Runtime::pinned`](crate::Runtime::pinned).
    pub fn copy_to_host<'d, T: Element>(
        &mut self,
        src: impl Into<DeviceSlice<'d, T>>,
        dst: &'env mut [T],
    ) -> Result<()> {
        let src = src.into();
        Stream::check_len("copy_to_host", src.len(), dst.len())?;
        let mut staging = self.stream.staging::<T>(src.len())?;
        self.stream.copy_pinned("copy_to_host", &PinnedSliceMut::from(&mut staging).0, src, CopyKind::Awaited)?;
        self.deliveries.push(Box::new(Delivered { staging, dst }));
        Ok(())
    }
}
