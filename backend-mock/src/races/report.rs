//! The report of a race.

use std::fmt;
use std::sync::Arc;

use highwater_hal::{StreamId, counted};

use crate::observer::{Origin, Range, Role, Space};
use crate::operation::Operation;
use crate::races::shadow::Access;
use crate::races::site::{Frame, Site, first_of_program};

/// The kind of conflict between two operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RaceKind {
    /// Both touch the same bytes, one of them writes, and no stream, event or wait of the host orders the two.
    Unordered,
    /// The second uses memory that the first has freed.
    AfterFree,
    /// Two products interleaved on one stream in one workspace: two threads called without taking turns.
    Interleaved,
}

/// Bytes of one memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bytes {
    /// The device whose addresses reach the memory; `None` for page-locked host memory.
    pub device: Option<u32>,
    /// The first byte.
    pub address: u64,
    /// The number of bytes.
    pub bytes: u64,
}

impl From<Range> for Bytes {
    fn from(range: Range) -> Self {
        let device = match range.space {
            Space::Host => None,
            Space::Device(device) => Some(device),
        };
        Self { device, address: range.address, bytes: range.bytes }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, address, bytes } = *self;
        let space = device.map_or(Space::Host, Space::Device);
        write!(f, "{}", Range { space, address, bytes })
    }
}

/// One of the two operations of a [`Race`].
#[derive(Debug, Clone)]
pub struct Place {
    site: Arc<Site>,
    range: Range,
    writes: bool,
    frees: bool,
    is_graph: bool,
    role: Role,
}

impl Place {
    pub(crate) fn of(access: &Access, is_graph: bool) -> Self {
        let Access { range, writes, frees, role, .. } = *access;
        Self { site: Arc::clone(&access.site), range, writes, frees, is_graph, role }
    }

    /// Returns the call of the backend. For an operation of a graph it is the launch.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.site.origin.operation
    }

    /// Returns the number of the call among those of the operation, from 1. [`MockGpu::calls`](crate::MockGpu::calls)
    /// and the option `fail` count the same way.
    #[must_use]
    pub fn call(&self) -> u64 {
        self.site.origin.call
    }

    /// For an operation of a graph, returns the call that recorded it, and its number.
    #[must_use]
    pub fn recorded(&self) -> Option<(Operation, u64)> {
        self.site.recorded.as_ref().map(|origin| (origin.operation, origin.call))
    }

    /// Returns the stream; `None` for an operation of the host and for default streams.
    #[must_use]
    pub fn stream(&self) -> Option<StreamId> {
        self.site.stream.and_then(|stream| stream.id)
    }

    /// Returns whether the operation writes the bytes, or gives them back.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.writes
    }

    /// Returns the bytes from the first to the last that the operation touches there. A matrix with a leading dimension
    /// above its rows leaves out some in between.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.range.into()
    }

    /// Returns whether the bytes are the workspace of a product, bound or the handle's own.
    #[must_use]
    pub fn is_workspace(&self) -> bool {
        matches!(self.role, Role::Workspace { .. })
    }

    /// Returns the name of the operand of a product that uses the bytes: `A`, `B`, `C`, `D`, `bias`, `alpha` or `beta`.
    /// A result that the product writes in place of C is `C`.
    #[must_use]
    pub fn operand(&self) -> Option<&'static str> {
        if let Role::Operand(name) = self.role { Some(name) } else { None }
    }

    /// Returns the name of the calling thread.
    #[must_use]
    pub fn thread(&self) -> &str {
        &self.site.origin.thread
    }

    /// Returns the callers, the innermost function first, without functions of the mock and of the standard library.
    /// Without debug information they have no locations. `Display` shows the frames of the program, and counts the
    /// others.
    #[must_use]
    pub fn frames(&self) -> Vec<Frame> {
        self.site.origin.frames()
    }

    /// Returns the callers when the operation was recorded, if a graph executes it.
    #[must_use]
    pub fn recorded_frames(&self) -> Vec<Frame> {
        self.site.recorded.as_ref().map_or_else(Vec::new, |origin| origin.frames())
    }

    /// Returns `FILE:LINE:COLUMN` of the call in the program, outside of Highwater, if debug information has it.
    #[must_use]
    pub fn location(&self) -> Option<String> {
        first_of_program(&self.frames()).and_then(|frame| frame.location.clone())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = &self.site.origin;
        write!(f, "`{}` (call {})", origin.operation, origin.call)?;
        if let Some((operation, call)) = self.recorded() {
            write!(f, ", where the `{operation}` of call {call}")?;
        }
        let verb = match (self.frees, self.writes) {
            (true, _) => "frees",
            (_, true) => "writes",
            _ => "reads",
        };
        if self.is_graph {
            f.write_str(" executes the graph")?;
        } else {
            write!(f, " {verb} {}", self.bytes())?;
            let name = if self.is_workspace() { Some("workspace") } else { self.operand() };
            name.map_or(Ok(()), |name| write!(f, " (its {name})"))?;
        }
        match &self.site.stream {
            Some(stream) if self.site.in_capture => write!(f, ", recorded on {stream}")?,
            Some(stream) => write!(f, ", on {stream}")?,
            None if origin.operation == Operation::CpuAccess => f.write_str(", by the CPU")?,
            None => f.write_str(", at once")?,
        }
        write!(f, ", called by thread `{}`", origin.thread)?;
        let show = |f: &mut fmt::Formatter<'_>, origin: &Origin| {
            let (frames, others) = origin.shown_frames();
            frames.iter().try_for_each(|frame| write!(f, "\n      {frame}"))?;
            if others == 0 {
                return Ok(());
            }
            write!(f, "\n      and {} of Highwater and the standard library", counted(others as u64, "frame"))
        };
        show(f, origin)?;
        if let Some(recorded) = &self.site.recorded {
            f.write_str("\n    recorded by")?;
            show(f, recorded)?;
        }
        Ok(())
    }
}

/// Two conflicting operations; see [`MockGpu::races`](crate::MockGpu::races). `Display` shows both places in full.
#[derive(Debug, Clone)]
pub struct Race {
    pub(crate) kind: RaceKind,
    pub(crate) first: Place,
    pub(crate) second: Place,
    pub(crate) overlap: Range,
}

impl Race {
    /// Returns the kind of conflict.
    #[must_use]
    pub fn kind(&self) -> RaceKind {
        self.kind
    }

    /// Returns the operation that was called earlier.
    #[must_use]
    pub fn first(&self) -> &Place {
        &self.first
    }

    /// Returns the operation that was called later.
    #[must_use]
    pub fn second(&self) -> &Place {
        &self.second
    }

    /// Returns the first bytes without a gap that both touch, by the addresses of the second.
    #[must_use]
    pub fn overlap(&self) -> Bytes {
        self.overlap.into()
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.second.is_graph { "the executable graph".to_owned() } else { self.overlap().to_string() };
        let (first, second) = (self.first.operation(), self.second.operation());
        match self.kind {
            RaceKind::Unordered => writeln!(f, "race: nothing orders `{first}` and `{second}`, which both use {what}")?,
            RaceKind::AfterFree => writeln!(f, "race: `{second}` uses {what}, which `{first}` freed")?,
            RaceKind::Interleaved => {
                writeln!(f, "race: `{first}` and `{second}` use {what} as a workspace at the same time")?;
            }
        }
        writeln!(f, "  1. {}\n  2. {}", self.first, self.second)?;
        f.write_str(match self.kind {
            RaceKind::Unordered if self.second.site.stream.is_none() => {
                "  hint: before the second, wait for the stream of the first, or for an event recorded after it"
            }
            RaceKind::Unordered if self.first.site.stream.is_none() => {
                "  hint: order the second thread after the first, and declare it with `MockGpu::hand_over`"
            }
            RaceKind::Unordered => {
                "  hint: record an event after the first and let the stream of the second wait for it, or let the host \
                 wait in between"
            }
            RaceKind::AfterFree => "  hint: free the memory after the last launch of a graph that uses it",
            RaceKind::Interleaved => {
                "  hint: let one thread at a time enqueue products on a stream, or use one workspace per thread"
            }
        })
    }
}
