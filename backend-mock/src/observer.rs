//! The interface between the engine and its observers: plain data, and a trait for each kind of observer.
//!
//! The engine knows nothing of its observers. It tells a [`UseObserver`] which memory each command uses until the
//! command has been executed, and an [`OrderObserver`] what orders the commands. Test mode is the first, the race
//! finder the second. Without observers, each hook costs one check of a null pointer.
//!
//! Observers change nothing in the engine and call nothing of it, so the engine may call a hook under any of its locks.

use std::any::Any;
use std::backtrace::Backtrace;
use std::fmt;
use std::sync::{Arc, OnceLock};

use highwater_hal::{DevicePtr, IdParts, StreamId, counted};

use crate::clock::Clock;
use crate::operation::Operation;

/// The observers of one backend.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observers {
    pub(crate) uses: Option<Arc<dyn UseObserver>>,
    pub(crate) order: Option<Arc<dyn OrderObserver>>,
}

/// An observer of the memory that unexecuted commands use.
pub(crate) trait UseObserver: fmt::Debug + Send + Sync {
    /// Notes a command that is about to be enqueued. The engine drops the note after it has executed the command, and
    /// before anybody can see that.
    fn enqueued(&self, operation: Operation, stream: OnStream, uses: Vec<Use>) -> Option<Note>;

    /// Returns the number of commands noted so far.
    fn noted(&self) -> u64;

    /// Notes that memory changes hands. `how` completes the sentence "the bytes ...". Only the first `noted` commands
    /// can conflict with that.
    fn changed_hands(&self, noted: u64, operation: Operation, how: &str, range: Range);

    /// Returns whether a command that has not been executed uses a range.
    fn is_in_use(&self, range: Range) -> bool;
}

/// An observer's note of a command.
pub(crate) type Note = Box<dyn Any + Send>;

/// An observer of what orders the commands, and of the memory that they use. The engine calls it in the thread that makes
/// the call of the backend.
pub(crate) trait OrderObserver: fmt::Debug + Send + Sync {
    /// Returns the current call. The engine holds no lock.
    fn origin(&self, operation: Operation) -> Arc<Origin>;

    /// Notes a new stream of a device, and returns the lane that its commands go into.
    fn stream_opened(&self, device: u32) -> usize;

    /// Notes that a stream is gone.
    fn stream_ended(&self, lane: usize);

    /// Counts the next operation of a stream, which the host calls now.
    fn begins(&self, lane: usize);

    /// Notes that the operation records a point of its stream.
    fn records(&self, lane: usize, point: &Observed);

    /// Notes that the operation has its stream wait for a point.
    fn waits(&self, lane: usize, point: &Observed);

    /// Notes the memory that a command of the operation uses. `launch` is the launch that executes the command, if a graph
    /// recorded it.
    fn uses(
        &self,
        stream: OnStream,
        origin: &Arc<Origin>,
        launch: Option<&Arc<Origin>>,
        touched: &[Touch],
        frees: bool,
    );

    /// Notes the memory that a recorded command uses. `part` is the index of its stream in the capture, and its clock.
    /// The capture keeps `notes` for the observer.
    fn captured(
        &self,
        notes: &mut Option<Note>,
        stream: OnStream,
        origin: &Arc<Origin>,
        touched: &[Touch],
        part: (usize, &Clock),
    );

    /// Returns what comes before the next operation of a stream.
    fn clock_of_stream(&self, lane: usize) -> Clock;

    /// Returns what comes before the end of all work that was enqueued for a device, also on streams that are gone.
    fn clock_of_device(&self, device: u32) -> Clock;

    /// Notes that the host has waited for everything in a clock.
    fn host_waited(&self, clock: &Clock);

    /// Notes that the host has seen a point reached.
    fn host_saw(&self, point: &Observed);

    /// Runs `ask`. What the host sees and waits for in it counts for no thread.
    fn ask_for_others(&self, ask: &mut dyn FnMut());

    /// Returns what comes before a point.
    fn clock_of_point(&self, point: &Observed) -> Clock;

    /// Notes that every thread knows from here on what the calling one has learned of a stream.
    fn shared(&self, lane: usize);

    /// Notes that every thread knows from here on that a point was reached.
    fn shared_point(&self, point: &Observed);

    /// Notes that the CPU accesses page-locked memory.
    fn accessed(&self, operation: Operation, touch: Touch);

    /// Notes that a call frees memory at once.
    fn freed(&self, operation: Operation, touch: Touch);

    /// Notes that these addresses do not reach some memory any more. Other addresses may.
    fn closed(&self, operation: Operation, touch: Touch);

    /// Forgets the uses of bytes that are handed out anew, or belong to the mock again.
    fn forget(&self, store: Store, start: u64, bytes: u64);
}

/// The data that an [`OrderObserver`] keeps with a point of a stream.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    /// The operations that come before the point.
    pub(crate) clock: OnceLock<Clock>,
    /// The knowledge of the thread that recorded it, if the finder distinguishes threads.
    pub(crate) known: OnceLock<Clock>,
    /// The file and the number of the record, if the event is shared between processes.
    pub(crate) shared: Option<(u64, u64)>,
}

/// A call of the backend.
#[derive(Debug)]
pub(crate) struct Origin {
    /// The number of the call among those that the finder has seen.
    pub(crate) serial: u64,
    pub(crate) operation: Operation,
    /// The number of the call among those of the operation.
    pub(crate) call: u64,
    pub(crate) thread: String,
    pub(crate) backtrace: Option<Backtrace>,
}

/// The stream of an operation, as messages name it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnStream {
    pub(crate) lane: usize,
    pub(crate) id: Option<StreamId>,
    pub(crate) is_legacy: bool,
    pub(crate) device: u32,
}

impl fmt::Display for OnStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id {
            Some(id) => write!(f, "{id:?}"),
            None if self.is_legacy => write!(f, "the legacy default stream of device {}", self.device),
            None => write!(f, "the default stream of a thread on device {}", self.device),
        }
    }
}

/// The address space of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Host,
    Device(u32),
}

/// A range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) space: Space,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Range {
    pub(crate) fn meets(&self, other: &Self) -> bool {
        self.space == other.space
            && self.address < other.address.saturating_add(other.bytes)
            && other.address < self.address.saturating_add(self.bytes)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, address, bytes } = *self;
        match space {
            Space::Host => write!(f, "{} of page-locked memory at {address:#x}", counted(bytes, "byte")),
            Space::Device(device) => {
                write!(f, "{} at {:?} of device {device}", counted(bytes, "byte"), DevicePtr::new(address))
            }
        }
    }
}

/// The bytes of a range that are meant: columns of equal length at equal distances, in parts at equal distances. Tiles
/// of one matrix lie between each other without sharing a byte.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    column: u64,
    columns: u64,
    column_step: u64,
    parts: u64,
    part_step: u64,
}

impl Layout {
    /// Returns the layout of all of that many bytes.
    pub(crate) const fn whole(bytes: u64) -> Self {
        Self { column: bytes, columns: 1, column_step: bytes, parts: 1, part_step: bytes }
    }

    /// Returns the layout of column-major matrices. The distances of columns and of matrices count elements. The distance of
    /// a single column or matrix is to nothing, and may be any number.
    pub(crate) fn matrices(rows: usize, columns: (usize, usize), parts: (usize, usize), size: usize) -> Self {
        let bytes = |elements: usize| (elements * size) as u64;
        let step = |count: usize, distance: usize| if count > 1 { bytes(distance) } else { 0 };
        let ((columns, ld), (parts, stride)) = (columns, parts);
        let mut layout = Self {
            column: bytes(rows),
            columns: columns as u64,
            column_step: step(columns, ld),
            parts: if stride == 0 { parts.min(1) } else { parts } as u64,
            part_step: step(parts, stride),
        };
        if layout.columns == 1 || layout.column_step == layout.column {
            layout.column *= layout.columns;
            (layout.columns, layout.column_step) = (1, layout.column);
        }
        if layout.columns == 1 && layout.part_step == layout.column {
            layout.column *= layout.parts;
            (layout.parts, layout.part_step) = (1, layout.column);
        }
        layout
    }

    /// Returns the bytes from the first to the end of the last.
    pub(crate) fn extent(&self) -> u64 {
        if self.column == 0 || self.columns == 0 || self.parts == 0 {
            return 0;
        }
        (self.parts - 1) * self.part_step + (self.columns - 1) * self.column_step + self.column
    }

    /// Returns offset and length of each piece without gaps.
    pub(crate) fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.parts).flat_map(move |part| {
            (0..self.columns).map(move |column| (part * self.part_step + column * self.column_step, self.column))
        })
    }
}

/// The role of memory in a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// All memory of a copy, a fill or a call of the host.
    Whole,
    /// The operand of a product with this name.
    Operand(&'static str),
    /// Space for the intermediate results of the product with this number.
    Workspace { product: usize, of_handle: bool },
}

/// One use of a range by a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Use {
    /// From the first to the last byte.
    pub(crate) range: Range,
    pub(crate) layout: Layout,
    pub(crate) writes: bool,
    pub(crate) role: Role,
}

impl Use {
    /// Returns whether the memory is the mock's own, which the last product that uses it gives back.
    pub(crate) fn is_of_handle(&self) -> bool {
        matches!(self.role, Role::Workspace { of_handle: true, .. })
    }
}

/// The location of bytes, whatever addresses reach them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Store {
    Host,
    /// A memory file, by its inode.
    File(u64),
    /// An executable graph, of which one launch runs at a time.
    Graph,
}

/// Bytes that an operation uses, and their location.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Touch {
    pub(crate) store: Store,
    pub(crate) start: u64,
    pub(crate) used: Use,
}

impl Touch {
    /// Returns all of a range that begins at `start` of a store.
    pub(crate) fn whole(store: Store, start: u64, range: Range) -> Self {
        let layout = Layout::whole(range.bytes);
        Self { store, start, used: Use { range, layout, writes: true, role: Role::Whole } }
    }

    /// Returns an executable graph, which one launch at a time executes.
    pub(crate) fn graph(exec: IdParts) -> Self {
        let number = u64::from(exec.slot) << 32 | u64::from(exec.generation.get());
        Self::whole(Store::Graph, number, Range { space: Space::Host, address: number, bytes: 1 })
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.used.range.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(layout: Layout) -> Vec<(u64, u64)> {
        layout.runs().collect()
    }

    #[test]
    fn packed_matrices_are_one_run_and_padded_ones_a_run_for_each_column() {
        assert_eq!(runs(Layout::matrices(3, (4, 3), (2, 12), 4)), [(0, 96)]);
        assert_eq!(runs(Layout::matrices(3, (2, 5), (2, 100), 4)), [(0, 12), (20, 12), (400, 12), (420, 12)]);
        assert_eq!(runs(Layout::matrices(3, (1, 5), (2, 5), 2)), [(0, 6), (10, 6)]);
        assert_eq!(runs(Layout::matrices(3, (2, 3), (5, 0), 1)), [(0, 6)], "one matrix for the whole batch");
        assert_eq!(Layout::matrices(3, (2, 5), (2, 100), 4).extent(), 400 + 20 + 12);
        assert_eq!(Layout::matrices(0, (2, 5), (2, 100), 4).extent(), 0);
        let endless = Layout::matrices(3, (1, usize::MAX), (1, 1 << 62), 4);
        assert_eq!((endless.extent(), runs(endless)), (12, vec![(0, 12)]));
        assert_eq!(runs(Layout::matrices(3, (2, 5), (1, usize::MAX), 4)), [(0, 12), (20, 12)]);
        assert_eq!(runs(Layout::matrices(3, (1, usize::MAX), (2, 5), 4)), [(0, 12), (20, 12)]);
    }
}
