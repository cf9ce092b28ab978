//! The inside of the mock, for the simulated vendor libraries and nobody else.
//!
//! A simulated driver checks its vendor's rules itself, and hands the engine what passes, through [`Hooks`] and the
//! [`Backend`](highwater_hal::Backend). The hooks check that nothing outside of the device's memory is touched. All
//! other rules are the caller's.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use highwater_hal::{CopyShape, DevicePtr, ErrorKind, EventId, Location, Result, StreamId, Workspace};

use crate::arena::Owner;
pub use crate::command::Call;
use crate::command::Command;
use crate::event::Point;
use crate::gpu::MockGpu;
use crate::imports::Source;
use crate::mapping::Mapping;
use crate::operation::Operation;
use crate::product::{RawProduct, Scratch};
use crate::sealed_file::{self, page_bytes};
use crate::state::{Shared, wrong_device};

/// The inside of a mock. Keeps the devices alive.
#[derive(Clone)]
pub struct Hooks(Arc<Shared>);

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooks")
    }
}

impl Hooks {
    /// Returns the inside of `gpu`.
    #[must_use]
    pub fn new(gpu: &MockGpu) -> Self {
        Self(gpu.shared())
    }

    /// Returns whether this process opened the mock.
    #[inline]
    #[must_use]
    pub fn is_own_process(&self) -> bool {
        self.0.calls.is_own_process()
    }

    /// Counts a call, and fails it if a fault is due, as the mock's own calls do.
    ///
    /// # Errors
    /// `Forked` in a forked child, else the due fault.
    pub fn enter(&self, operation: Operation) -> Result<()> {
        self.0.calls.enter(operation).map(|_| ())
    }

    // ------------------------------------------------------------------ streams

    /// Makes a stream run code, or its capture record it.
    ///
    /// # Errors
    /// As for [`Backend::copy`](highwater_hal::Backend::copy).
    pub fn enqueue_call(&self, stream: StreamId, call: Call) -> Result<()> {
        let operation = Operation::Copy;
        self.0.stream(operation, stream)?.enqueue(operation, Command::Call(call))
    }

    /// Enqueues a copy whose device sides lie in the memory of their device. Host memory need not be page-locked, and
    /// the stream may belong to any device.
    ///
    /// # Errors
    /// As for [`Backend::copy`](highwater_hal::Backend::copy).
    ///
    /// # Safety
    /// As for [`Backend::copy`](highwater_hal::Backend::copy).
    pub unsafe fn enqueue_copy(&self, stream: StreamId, dst: Location, src: Location, bytes: usize) -> Result<()> {
        let operation = self.0.calls.enter(Operation::Copy)?;
        let queue = self.0.stream(operation, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let shape = CopyShape::new(bytes, 1);
        let on_device = |what: &str, device: u32, ptr: DevicePtr| {
            self.0.device(operation, device)?.range(operation, what, ptr, bytes)
        };
        let command = match (dst, src) {
            (Location::Device { device, ptr }, Location::Host(src)) => {
                Command::CopyToDevice { src, dst: on_device("destination", device, ptr)?, shape, device }
            }
            (Location::Host(dst), Location::Device { device, ptr }) => {
                Command::CopyToHost { src: on_device("source", device, ptr)?, dst, shape, device }
            }
            (Location::Device { device: dst_device, ptr: dst }, Location::Device { device: src_device, ptr: src }) => {
                let dst = on_device("destination", dst_device, dst)?;
                let src = on_device("source", src_device, src)?;
                Command::CopyOnDevices { src, src_device, dst, dst_device, shape }
            }
            (Location::Host(dst), Location::Host(src)) => {
                let (dst, src) = (dst.address(), src.address());
                Command::Call(Call::new(move || {
                    // SAFETY: the caller promised that both ranges stay and that no other code writes them. They may
                    // overlap.
                    unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, bytes) };
                }))
            }
        };
        queue.enqueue(operation, command)
    }

    /// Enqueues a copy of `bytes`, which the call owns, to device memory.
    ///
    /// # Errors
    /// As for [`Backend::copy`](highwater_hal::Backend::copy).
    pub fn enqueue_write(&self, stream: StreamId, device: u32, ptr: DevicePtr, bytes: Vec<u8>) -> Result<()> {
        let operation = self.0.calls.enter(Operation::Copy)?;
        let queue = self.0.stream(operation, stream)?;
        let dst = self.0.device(operation, device)?.range(operation, "destination", ptr, bytes.len())?;
        let engine = Arc::clone(&self.0.engine);
        let call = Call::new(move || engine.devices[device as usize].memory.write_slice(dst, &bytes));
        queue.enqueue(operation, Command::Call(call))
    }

    /// Enqueues a fill of device memory with `pattern`, eight bytes whose period divides the address. The stream may
    /// belong to any device.
    ///
    /// # Errors
    /// As for [`Backend::fill`](highwater_hal::Backend::fill).
    pub fn enqueue_fill(
        &self,
        stream: StreamId,
        device: u32,
        ptr: DevicePtr,
        bytes: usize,
        pattern: u64,
    ) -> Result<()> {
        let operation = self.0.calls.enter(Operation::Fill)?;
        let queue = self.0.stream(operation, stream)?;
        let dst = self.0.device(operation, device)?.range(operation, "destination", ptr, bytes)?;
        queue.enqueue(operation, Command::Fill { device, dst, bytes, pattern })
    }

    /// Orders later work of `stream` after the enqueued work of `before`. Does nothing if either takes part in a
    /// capture.
    ///
    /// # Errors
    /// As for [`Backend::record_event`](highwater_hal::Backend::record_event).
    pub fn order(&self, stream: StreamId, before: StreamId) -> Result<()> {
        let operation = Operation::StreamWaitEvent;
        let (after, before) = (self.0.stream(operation, stream)?, self.0.stream(operation, before)?);
        if Arc::ptr_eq(&after, &before) || before.is_idle() || before.is_recording() || after.is_recording() {
            return Ok(());
        }
        let point = before.record(operation, Point::new())?;
        after.wait_for(operation, point)
    }

    /// Returns the number of records of an event by all processes; 0 if the event is not an interprocess event.
    ///
    /// # Errors
    /// `InvalidHandle` for an unknown event.
    pub fn records_of(&self, event: EventId) -> Result<u64> {
        let event = self.0.event(Operation::QueryEvent, event)?;
        Ok(event.shared.as_ref().map_or(0, |shared| shared.records()))
    }

    /// Loses the capture that a stream takes part in, if any. The errors of later calls contain `why`.
    pub fn lose_capture(&self, stream: StreamId, why: &'static str) {
        if let Ok(stream) = self.0.stream(Operation::IsCapturing, stream)
            && let Some(recorder) = stream.queue.lock().recorder()
        {
            recorder.lose(why);
        }
    }

    /// Lets the capture that began on a stream end without a wait for the streams that joined it and recorded nothing.
    pub fn excuse_idle_streams(&self, origin: StreamId) {
        if let Ok(stream) = self.0.stream(Operation::EndCapture, origin)
            && let Some(mut recorder) = stream.queue.lock().recorder()
        {
            recorder.excuse_idle();
        }
    }

    /// Takes a stream out of its capture, if any. The capture goes on and keeps what the stream recorded.
    pub fn leave_capture(&self, stream: StreamId) {
        if let Ok(stream) = self.0.stream(Operation::IsCapturing, stream) {
            let part = stream.queue.lock().part.take();
            drop(part);
        }
    }

    /// Returns whether the device was lost, by a command that panicked or by [`MockGpu::lose_device`].
    #[must_use]
    pub fn is_lost(&self, device: u32) -> bool {
        self.0.engine.devices.get(device as usize).is_some_and(|device| device.is_lost())
    }

    /// Waits until the device has executed everything that was enqueued before the call. Captures are not disturbed.
    pub fn wait_for_device(&self, device: u32) {
        if device >= self.0.devices {
            return;
        }
        let clock = self.0.engine.clock_of(device);
        self.0.engine.streams_of(device).iter().for_each(|stream| stream.drain());
        self.0.engine.waited(clock);
    }

    // ------------------------------------------------------------------ memory

    /// Returns first address and length of the device's own memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the device does not exist.
    pub fn own_memory(&self, device: u32) -> Result<(u64, u64)> {
        let memory = &self.0.device(Operation::MemoryInfo, device)?.memory;
        Ok((memory.base(), memory.bytes()))
    }

    /// Returns the file that holds the device's own memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the device does not exist.
    pub fn memory_file(&self, device: u32) -> Result<&OwnedFd> {
        Ok(self.0.device(Operation::ExportMemory, device)?.memory.file())
    }

    /// Allocates pages of the device's own memory file, which a legacy handle can name. When they are freed, other blocks get
    /// them, even if another process has them open.
    ///
    /// # Errors
    /// `DeviceLost`, `OutOfMemory`.
    pub fn allocate_pages(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        let operation = self.0.calls.enter(Operation::Allocate)?;
        let device = self.0.device(operation, device)?;
        device.check_not_lost(operation)?;
        device.allocate(operation, bytes, Owner::Pages, None)
    }

    /// Returns offset, length and number of the allocation of [`Hooks::allocate_pages`] that begins at `ptr`.
    ///
    /// # Errors
    /// `InvalidPointer` and `InvalidArgument` for other memory.
    pub fn pages(&self, device: u32, ptr: DevicePtr) -> Result<(u64, u64, u64)> {
        let (offset, block) = self.0.device(Operation::ExportMemory, device)?.pages(Operation::ExportMemory, ptr)?;
        Ok((offset, block.bytes, block.serial))
    }

    /// Takes bytes of the device for memory that lies elsewhere.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn take(&self, device: u32, bytes: usize) -> Result<DevicePtr> {
        self.0.device(Operation::Allocate, device)?.allocate(Operation::Allocate, bytes, Owner::Mock, None)
    }

    /// Undoes [`Hooks::take`].
    pub fn give_back(&self, device: u32, ptr: DevicePtr, bytes: usize) {
        if let Ok(device) = self.0.device(Operation::Free, device) {
            device.free_own(ptr, bytes as u64);
        }
    }

    /// Opens a part of a memory file for a device. Opening the same part again returns the same address, and counts.
    ///
    /// # Errors
    /// `InvalidArgument` if the file is no sealed memory file or too short, `OutOfMemory`.
    pub fn open(&self, device: u32, file: &OwnedFd, offset: u64, bytes: u64, serial: u64) -> Result<DevicePtr> {
        let operation = Operation::OpenMemory;
        let device = self.0.device(operation, device)?;
        let (source, length) = checked_source(operation, file, offset, bytes, serial)?;
        let mut imports = device.memory.imports.write();
        let place = match imports.open_again(&source) {
            Some(place) => place,
            None => {
                let mapping = map(operation, file, offset, length)?;
                imports.insert(source, mapping).ok_or_else(|| {
                    operation.error(ErrorKind::OutOfMemory, format!("no addresses are left for {bytes} bytes"))
                })?
            }
        };
        Ok(DevicePtr::new(device.memory.base() + place))
    }

    /// Closes once what [`Hooks::open`] or [`Hooks::map`] opened.
    ///
    /// # Errors
    /// `InvalidPointer` if nothing is open.
    pub fn close(&self, device: u32, ptr: DevicePtr) -> Result<()> {
        let operation = Operation::CloseMemory;
        self.0.device(operation, device)?.close_import(operation, ptr)
    }

    /// Reserves addresses of the device.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn reserve(&self, device: u32, bytes: u64, alignment: u64) -> Result<u64> {
        let operation = Operation::Allocate;
        let memory = &self.0.device(operation, device)?.memory;
        let place = memory.imports.write().reserve(memory.base(), bytes, alignment);
        let place = place.ok_or_else(|| {
            operation.error(ErrorKind::OutOfMemory, format!("no addresses are left for {bytes} bytes"))
        })?;
        Ok(memory.base() + place)
    }

    /// Undoes [`Hooks::reserve`].
    pub fn unreserve(&self, device: u32, address: u64) {
        if let Ok(device) = self.0.device(Operation::Free, device)
            && let Some(place) = address.checked_sub(device.memory.base())
        {
            device.memory.imports.write().unreserve(place);
        }
    }

    /// Maps a part of a memory file at an address of [`Hooks::reserve`].
    ///
    /// # Errors
    /// `InvalidArgument` if the file is no sealed memory file or too short, `InvalidPointer` if the address is in use.
    pub fn map(&self, device: u32, address: u64, file: &OwnedFd, offset: u64, bytes: u64, serial: u64) -> Result<()> {
        let operation = Operation::OpenMemory;
        let memory = &self.0.device(operation, device)?.memory;
        let (source, length) = checked_source(operation, file, offset, bytes, serial)?;
        let mapping = map(operation, file, offset, length)?;
        let place = address.checked_sub(memory.base()).filter(|&place| place >= memory.bytes());
        if place.is_some_and(|place| memory.imports.write().insert_at(place, source, mapping)) {
            return Ok(());
        }
        Err(operation.error(ErrorKind::InvalidPointer, format!("nothing can be mapped at {address:#x}")))
    }
}

impl MockGpu {
    /// Enqueues a product on a stream of `device`, with its intermediate results in `workspace`. Without a workspace it
    /// is a single command. Counts as a call of [`Operation::Gemm`]. Returns the number of commands.
    ///
    /// # Errors
    /// `InvalidArgument` and `Unsupported` for what the product asks for, `InvalidPointer` for ranges that are not inside
    /// one block of the device, `InvalidHandle` for an unknown stream, `WrongDevice` for a stream of another device.
    ///
    /// # Safety
    /// As for [`BlasHandle::run_plan`](highwater_hal::BlasHandle::run_plan). No other work may use the workspace until
    /// the product has completed.
    pub unsafe fn enqueue_product(
        &self,
        device: u32,
        stream: StreamId,
        product: &RawProduct,
        workspace: Option<Workspace>,
    ) -> Result<usize> {
        let shared = self.shared();
        let operation = shared.calls.enter(Operation::Gemm)?;
        let queue = shared.stream(operation, stream)?;
        let found = shared.device(operation, device)?;
        if stream.device() != device {
            return Err(wrong_device(operation, stream, "the product", device));
        }
        let scratch = workspace.map(|workspace| Scratch { workspace, own: None, limit: usize::MAX });
        product.enqueue(operation, found, &queue, scratch, shared.gemm_gap)
    }
}

/// Creates a memory file of `bytes` zeros, without a name in any file system and sealed in its size. `/proc` shows
/// `name`.
///
/// # Errors
/// An error of the system.
pub fn create_file(name: &str, bytes: u64) -> std::io::Result<OwnedFd> {
    Ok(sealed_file::create(name, bytes)?)
}

/// Returns the size of a page of the system.
#[must_use]
pub fn page_size() -> u64 {
    page_bytes()
}

/// Returns inode number and size of a memory file that is sealed against shrinking.
///
/// # Errors
/// `InvalidArgument` for any other file.
pub fn check_file(file: &OwnedFd) -> Result<(u64, u64)> {
    let (id, bytes) = sealed_file::check(Operation::OpenMemory, file)?;
    Ok((id.inode, bytes))
}

/// Returns the start time of a process in the kernel's ticks, the low half; `None` if it does not exist.
#[must_use]
pub fn start_time(process: u32) -> Option<u32> {
    crate::peers::start_time(process)
}

/// Returns whether the process has begun to exit, as the mock sees it.
#[must_use]
pub fn is_exiting() -> bool {
    highwater_hal::exit::has_begun()
}

fn checked_source(operation: Operation, file: &OwnedFd, offset: u64, bytes: u64, serial: u64) -> Result<(Source, u64)> {
    let (id, file_bytes) = sealed_file::check(operation, file)?;
    let length = bytes.checked_next_multiple_of(page_bytes()).unwrap_or(u64::MAX);
    let fits = offset.checked_add(length).is_some_and(|end| end <= file_bytes);
    if bytes == 0 || !offset.is_multiple_of(page_bytes()) || !fits {
        return Err(operation.error(
            ErrorKind::InvalidArgument,
            format!("{bytes} bytes at {offset} were asked for, the file has {file_bytes}"),
        ));
    }
    Ok((Source { file: id, offset, bytes, serial }, length))
}

fn map(operation: Operation, file: &OwnedFd, offset: u64, length: u64) -> Result<Mapping> {
    // SAFETY: `checked_source` found the file long enough and sealed against shrinking.
    unsafe { Mapping::new(file, offset, length) }
        .map_err(|error| sealed_file::failed(operation, "cannot map the memory file", error))
}
