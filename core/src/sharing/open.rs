//! [`Runtime::open_shared`] and [`Runtime::open_shared_all`]: buffers of other processes. [`Runtime::share_all`] makes a batch.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::batch::{BatchBuilder, BatchSlice, too_many};
use super::exporter::Memory;
use super::patience::Patience;
use super::ticket::{not_given_out, values};
use super::{Import, ImportOptions, Imported, OwnerDeath, Sharing, SharingProcess, Ticket, TicketBatch, Wanted};
use crate::buffer::{DeviceBuffer, DeviceSlice};
use crate::capture::thread::{in_capture, refuse_in_capture};
use crate::device_block::{DeviceBlock, Origin, StreamEnds};
use crate::runtime::Runtime;
use crate::services::{DeviceState, lacks_transport};
use highwater_hal::{Element, Error, ErrorKind, Result, counted};

/// Returns the ordinal of a device that supports the ticket's transport.
fn device_with_transport(operation: &'static str, device: &DeviceState, ticket: &Ticket) -> Result<u32> {
    if !device.capabilities.ipc_transports.contains(ticket.transport) {
        return Err(lacks_transport(operation, ticket.transport));
    }
    Ok(device.info.ordinal)
}

/// Returns the original block of a ticket of this runtime.
fn original(sharing: &Sharing, ticket: &Ticket) -> Result<Arc<DeviceBlock>> {
    match sharing.original(ticket)? {
        Memory::Device(block, _) => Ok(block),
        Memory::Pinned(_) | Memory::Held(_) => Err(not_given_out("its allocation is page-locked memory")),
    }
}

/// Refuses a ticket that this process could not inherit, if the options ask for that.
pub(super) fn check_heir(sharing: &Sharing, ticket: &Ticket, options: &ImportOptions) -> Result<()> {
    if options.owner_death() == OwnerDeath::Inherit { sharing.check_heir(ticket) } else { Ok(()) }
}

/// Keeps the handles of an import that this process may inherit.
pub(super) fn hold(
    sharing: &Arc<Sharing>,
    import: &Arc<Import>,
    options: &ImportOptions,
    patience: &mut Option<Patience>,
) -> Result<()> {
    if options.owner_death() == OwnerDeath::Inherit { sharing.hold(import, patience) } else { Ok(()) }
}

/// Returns an error of one part of a batch, with the name of the part.
fn about(operation: &'static str, part: &str, error: Error) -> Error {
    let message = format!("{part}: {}", error.message());
    let named = Error::new(error.kind(), operation, message).with_hint(error.hint());
    error.code().into_iter().fold(named, Error::with_code)
}

/// Returns the values of a range of an allocation in the original block, which may be a part of its allocation.
fn range_in<T: Element>(block: &DeviceBlock, offset: u64, length: u64) -> Result<Range<usize>> {
    let (of_block, size) = (block.shared_range().unwrap_or_default(), size_of::<T>() as u64);
    let start = offset.checked_sub(of_block.start).filter(|start| start.is_multiple_of(size));
    let is_inside = offset.saturating_add(length) <= of_block.end;
    let start = start.filter(|_| is_inside).ok_or_else(|| not_given_out("its range is not in the shared buffer"))?;
    let index = |bytes: u64| usize::try_from(bytes / size).unwrap_or(usize::MAX);
    Ok(index(start)..index(start).saturating_add(index(length)))
}

impl Runtime {
    /// Opens a buffer that another process shares. For a ticket of this runtime, returns the original buffer. Waits until the
    /// device work that was enqueued before the share is done.
    ///
    /// The first open of an allocation sends a request to its exporter and maps the memory. Later opens reuse the mapping. The
    /// buffer behaves like any other and keeps the memory allocated in the exporter. Dropping it does not wait.
    ///
    /// # Errors
    /// - `Expired`: the exporter has ended or has freed the buffer, or the ticket is from another boot or machine.
    /// - `InvalidArgument`: the length or the offset of the range is not a multiple of the size of `T`, or the ticket names
    ///   page-locked memory.
    /// - `DeviceMissing`: the ticket's device is not visible to this process.
    /// - `PermissionDenied`: the exporter does not admit this process, this runtime does not trust the exporter's user
    ///   ([`Openers`](crate::Openers)), or the ticket lacks its secret.
    /// - `Unsupported`: the device does not support the ticket's transport.
    /// - `InvalidState`: the exporter is stopped and has not answered for 1 second, or it runs and has not answered for 10
    ///   seconds. The second limit is 2 seconds for an exporter that did not answer the last open. Each limit covers all requests,
    ///   connections and heirs of one call together. The wait for device work that was enqueued before the share has no limit, unless the
    ///   exporter is stopped.
    /// - `OperatingSystem`: this process or the exporter has run out of descriptors, threads or addresses.
    /// - `Capture`: this thread is inside a capture.
    pub fn open_shared<T: Element>(&self, ticket: &Ticket) -> Result<DeviceBuffer<T>> {
        self.open_shared_with(ticket, &ImportOptions::new())
    }

    /// Opens a buffer as [`Runtime::open_shared`] does, and chooses what happens when the exporter dies. For a ticket of this
    /// runtime, the options have no effect. [`Owner`](crate::Owner) has an example.
    ///
    /// # Errors
    /// As [`Runtime::open_shared`].
    pub fn open_shared_with<T: Element>(&self, ticket: &Ticket, options: &ImportOptions) -> Result<DeviceBuffer<T>> {
        const OPERATION: &str = "open_shared";
        let inner = &self.inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        let range = ticket.values::<T>(OPERATION)?;
        if ticket.is_pinned {
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, "the ticket names page-locked memory")
                .with_hint("open it with `Runtime::open_pinned`"));
        }
        let device = self.device_of(OPERATION, ticket)?;
        let sharing = inner.sharing("open_shared")?;
        check_heir(sharing, ticket, options)?;
        if sharing.is_own(ticket) {
            let block = original(sharing, ticket)?;
            let range = range_in::<T>(&block, ticket.offset, ticket.length)?;
            return Ok(DeviceBuffer::part(self.clone(), block, range));
        }
        let device = device_with_transport(OPERATION, device, ticket)?;
        // Of both steps together.
        let mut patience = None;
        let import = sharing.open(Wanted { ticket, device }, &mut patience)?;
        hold(sharing, &import, options, &mut patience)
            .inspect_err(|_| sharing.release_after(Arc::clone(&import), Vec::new(), false))?;
        Ok(DeviceBuffer::part(self.clone(), self.imported(import, options), range))
    }

    /// Returns the device of a ticket.
    fn device_of(&self, operation: &'static str, ticket: &Ticket) -> Result<&DeviceState> {
        let inner = &self.inner;
        let uuid = ticket.device_uuid();
        inner.devices.iter().find(|device| device.info.uuid == uuid).ok_or_else(|| {
            Error::new(
                ErrorKind::DeviceMissing,
                operation,
                format!(
                    "no device here has the UUID {:032x}, this process has {}",
                    u128::from_be_bytes(uuid),
                    counted(inner.devices.len(), "device")
                ),
            )
            .with_hint("make the exporter's device visible to this process")
        })
    }

    /// Returns the block of an import. Its end releases the import.
    fn imported(&self, import: Arc<Import>, options: &ImportOptions) -> Arc<DeviceBlock> {
        let (device, ptr) = (import.device, import.ptr);
        let origin = Imported::new(self.clone(), Arc::clone(&import), options);
        let block = DeviceBlock::new(&self.inner.frees, device, ptr, Origin::Shared(Box::new(origin)));
        if options.owner_death() == OwnerDeath::Release
            && let Some(sharing) = self.inner.sharing.get()
        {
            sharing.watch_owner(&import, &block);
        }
        block
    }

    /// Shares many slices at once. The batch names each allocation once, so that another process opens each once, and all slices
    /// with one call: [`Runtime::open_shared_all`]. The slices may overlap, repeat, and lie on different devices. The same
    /// conditions apply as for [`DeviceSlice::share`].
    ///
    /// ```
    /// use highwater_core::{DeviceSlice, Runtime, TicketBatch};
    /// use highwater_mock::{MockGpu, MockOptions};
    ///
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let device = runtime.device(0)?;
    /// let stream = device.create_stream()?;
    /// // One allocation with the tensors of a layer.
    /// let layer = device.allocate_shared::<f32>(1000)?;
    /// stream.fill(&layer, 0.5_f32)?;
    /// let tensors = [layer.slice(0..600)?, layer.slice(600..900)?, layer.slice(900..1000)?];
    /// let batch = runtime.share_all(&tensors)?.to_bytes(); // send these bytes to another process
    ///
    /// // In that process. In this one, it returns the original buffers:
    /// let opened = runtime.open_shared_all::<f32>(&TicketBatch::from_bytes(&batch)?)?;
    /// assert_eq!(opened.iter().map(|tensor| tensor.len()).collect::<Vec<_>>(), [600, 300, 100]);
    /// assert_eq!(stream.download(&opened[1])?, vec![0.5; 300]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// Slices of different types are shared as bytes: [`DeviceSlice::as_bytes`].
    ///
    /// # Errors
    /// - `InvalidArgument`: a slice is of another runtime, or its memory comes neither from
    ///   [`Device::allocate_shared`](crate::Device::allocate_shared) nor from [`Device::adopt`](crate::Device::adopt); or there
    ///   are more slices or allocations than the maximum.
    /// - Otherwise as [`DeviceSlice::share`]. The message names the slice.
    pub fn share_all<T: Element>(&self, slices: &[DeviceSlice<'_, T>]) -> Result<TicketBatch> {
        const OPERATION: &str = "share_all";
        self.inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        if slices.len() > TicketBatch::MAX_SLICES {
            return Err(too_many(OPERATION, "slices", slices.len(), TicketBatch::MAX_SLICES));
        }
        let mut batch = BatchBuilder::new(slices.len());
        let mut ends = StreamEnds::default();
        // The number of the allocation, and the offset of the block in it.
        let mut known: HashMap<*const DeviceBlock, (u32, u64)> = HashMap::new();
        // Neighbors are mostly in one allocation.
        let mut last = None;
        for (place, slice) in slices.iter().enumerate() {
            let address = Arc::as_ptr(slice.block());
            let (number, start) = match last.filter(|(block, _)| *block == address) {
                Some((_, shared)) => shared,
                None => match known.get(&address) {
                    Some(shared) => *shared,
                    None => {
                        let mut share = || {
                            slice.block().check_runtime(OPERATION, &self.inner.services)?;
                            let ticket = slice.block().share_with(&mut ends)?;
                            let start = ticket.offset;
                            batch.allocation(ticket).map(|number| (number, start))
                        };
                        let shared = share().map_err(|error| about(OPERATION, &format!("slice {place}"), error))?;
                        known.insert(address, shared);
                        shared
                    }
                },
            };
            last = Some((address, (number, start)));
            let (offset, length) = slice.byte_range();
            batch.slice(number, start + offset, length);
        }
        Ok(batch.end())
    }

    /// Opens the slices of a batch, in order. Each allocation is opened once, and the requests for all of them are sent before
    /// the first answer is awaited. Waits until the device work that was enqueued before the share is done.
    ///
    /// Each buffer can be dropped by itself. The last buffer of an allocation releases it. If one allocation cannot be opened,
    /// the call opens nothing.
    ///
    /// A batch counts as one open of each of its allocations in [`SharingStatistics`](crate::SharingStatistics). Any number of
    /// processes may open a batch, once or repeatedly. [`TicketBatch::ticket`] returns the ticket of one slice.
    ///
    /// # Errors
    /// As [`Runtime::open_shared`]. The message names the slice or the allocation. The time limits for answers hold for each
    /// allocation.
    pub fn open_shared_all<T: Element>(&self, batch: &TicketBatch) -> Result<Vec<DeviceBuffer<T>>> {
        self.open_shared_all_with(batch, &ImportOptions::new())
    }

    /// Opens the slices of a batch as [`Runtime::open_shared_all`] does, and chooses what happens when an exporter dies. The
    /// options apply to the allocations of other runtimes.
    ///
    /// # Errors
    /// As [`Runtime::open_shared_all`].
    pub fn open_shared_all_with<T: Element>(
        &self,
        batch: &TicketBatch,
        options: &ImportOptions,
    ) -> Result<Vec<DeviceBuffer<T>>> {
        const OPERATION: &str = "open_shared_all";
        let inner = &self.inner;
        inner.check(OPERATION)?;
        refuse_in_capture(OPERATION)?;
        let in_slice = |place: usize, error| about(OPERATION, &format!("slice {place}"), error);
        let ranges = batch.slices.iter().enumerate().map(|(place, slice)| {
            values::<T>(OPERATION, slice.offset, slice.length).map_err(|error| in_slice(place, error))
        });
        let ranges = ranges.collect::<Result<Vec<_>>>()?;
        let sharing = inner.sharing(OPERATION)?;
        let allocations = &batch.allocations;
        let of_allocation = |number: usize, error| {
            let slice = batch.slices.iter().position(|slice| slice.allocation as usize == number).unwrap_or_default();
            about(OPERATION, &format!("allocation {number}, which slice {slice} uses first"), error)
        };
        let mut foreign = Vec::new();
        for (number, ticket) in allocations.iter().enumerate() {
            let device = self
                .device_of(OPERATION, ticket)
                .and_then(|device| check_heir(sharing, ticket, options).map(|()| device))
                .map_err(|error| of_allocation(number, error))?;
            if !sharing.is_own(ticket) {
                let device =
                    device_with_transport(OPERATION, device, ticket).map_err(|error| of_allocation(number, error))?;
                foreign.push((number, Wanted { ticket, device }));
            }
        }
        let wanted: Vec<_> = foreign.iter().map(|(_, wanted)| *wanted).collect();
        let mut patience = None;
        let opened = sharing.open_all(&wanted, &mut patience);
        let imports = opened.map_err(|(at, error)| of_allocation(foreign[at].0, error))?;
        // From here on, the blocks release the imports if the call fails.
        let mut hold = |import| {
            // The time restarts for each allocation of a batch.
            patience.iter_mut().for_each(Patience::renew);
            hold(sharing, import, options, &mut patience)
        };
        let held: Vec<_> = imports.iter().map(&mut hold).collect();
        let mut imported =
            imports.into_iter().map(|import| self.imported(import, options)).collect::<Vec<_>>().into_iter();
        for (held, (number, _)) in held.into_iter().zip(&foreign) {
            held.map_err(|error| of_allocation(*number, error))?;
        }
        let mut blocks = Vec::with_capacity(allocations.len());
        for (number, ticket) in allocations.iter().enumerate() {
            let block = if sharing.is_own(ticket) {
                Some(original(sharing, ticket).map_err(|error| of_allocation(number, error))?)
            } else {
                imported.next()
            };
            blocks.extend(block);
        }
        let buffer = |(place, (slice, range)): (usize, (&BatchSlice, Range<usize>))| {
            let number = slice.allocation as usize;
            let block = Arc::clone(&blocks[number]);
            let range = if sharing.is_own(&allocations[number]) {
                range_in::<T>(&block, slice.offset, slice.length).map_err(|error| in_slice(place, error))?
            } else {
                range
            };
            Ok(DeviceBuffer::part(self.clone(), block, range))
        };
        batch.slices.iter().zip(ranges).enumerate().map(buffer).collect()
    }

    /// Returns the memory that this runtime shares and has open, as [`ipc::processes`](crate::ipc::processes) lists it for other
    /// programs. Waits for no process. In a forked child the lists are empty.
    ///
    /// ```
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// let buffer = runtime.device(0)?.allocate_shared::<f32>(1000)?;
    /// let _ticket = buffer.share()?;
    /// let list = runtime.shared_memory();
    /// assert_eq!((list.shared.len(), list.opened.len()), (1, 0));
    /// assert!(list.shared[0].holders.is_empty(), "no process has opened it");
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    #[must_use]
    pub fn shared_memory(&self) -> SharingProcess {
        let mut process = SharingProcess::new(std::process::id());
        // In a forked child, a thread that does not exist may hold a lock.
        if self.inner.generation.is_current()
            && let Some(sharing) = self.inner.sharing.get()
        {
            process.add(sharing.listing());
        }
        process
    }

    /// Frees shared memory that no other process has open, and unmaps idle memory of other processes. Shared memory is also
    /// freed automatically when other processes release it or end. Returns the freed bytes. Inside a capture, frees nothing and
    /// returns 0.
    ///
    /// # Errors
    /// `Forked` or `ShuttingDown`.
    pub fn trim_shared(&self) -> Result<u64> {
        self.inner.check("trim_shared")?;
        let Some(sharing) = self.inner.sharing.get().filter(|_| !in_capture()) else { return Ok(0) };
        Ok(sharing.trim())
    }

    /// As [`Runtime::trim_shared`].
    ///
    /// # Errors
    /// As [`Runtime::trim_shared`].
    #[deprecated(note = "use `trim_shared`")]
    pub fn collect(&self) -> Result<u64> {
        self.trim_shared()
    }
}
