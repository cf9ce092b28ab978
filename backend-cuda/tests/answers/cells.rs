//! The axes, and their product with the calls.

use crate::memory::{Memory, SIZE};
use crate::setting::{DEFAULT_MEMORY, GLOBAL, RELAXED, THREAD_LOCAL};
use crate::table::{ARGUMENT_CALLS, COPY_CALLS, Call, EVENT_CALLS, PLAIN_CALLS, STREAM_CALLS, Sides};

/// The stream of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One that does not wait for the legacy stream.
    Own,
    /// One that does.
    Blocking,
    Low,
    High,
    /// 0.
    Legacy,
    /// 1, the other number of the legacy stream.
    LegacyNumber,
    /// 2, the thread's own default stream.
    PerThread,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Blocking => "blocking",
            Self::Low => "low",
            Self::High => "high",
            Self::Legacy => "legacy",
            Self::LegacyNumber => "legacy-1",
            Self::PerThread => "per-thread",
        }
    }

    /// Whether a program created the stream, which then belongs to a context.
    pub(crate) fn is_created(self) -> bool {
        matches!(self, Self::Own | Self::Blocking | Self::Low | Self::High)
    }
}

/// The state of the stream of the call, or of one beside it. The number is the mode of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Idle,
    /// The stream has work that lasts longer than the call may take.
    Busy,
    /// Another stream has such work. Beside the legacy stream, it is a blocking one.
    OtherBusy,
    /// A capture began on the stream.
    Origin(u32),
    /// The stream joined a capture.
    Member(u32),
    /// A non-blocking stream captures.
    Beside(u32),
    /// A blocking stream captures.
    BesideBlocking(u32),
    /// The capture of the stream is lost, and has not ended.
    Lost(u32),
    /// A lost capture was ended.
    AfterLost(u32),
}

impl State {
    fn name(self) -> String {
        let with = |what: &str, mode: u32| {
            let mode = match mode {
                GLOBAL => "global",
                THREAD_LOCAL => "thread-local",
                _ => "relaxed",
            };
            format!("{what}-{mode}")
        };
        match self {
            Self::Idle => "idle".to_owned(),
            Self::Busy => "busy".to_owned(),
            Self::OtherBusy => "other-busy".to_owned(),
            Self::Origin(mode) => with("origin", mode),
            Self::Member(mode) => with("member", mode),
            Self::Beside(mode) => with("beside", mode),
            Self::BesideBlocking(mode) => with("beside-blocking", mode),
            Self::Lost(mode) => with("lost", mode),
            Self::AfterLost(mode) => with("after-lost", mode),
        }
    }
}

/// The thread of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Thread {
    /// The thread that set the cell up and began the capture.
    Same,
    Other,
}

/// The context that is current in the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Context {
    /// That of the objects.
    Same,
    None,
    /// That of the second device.
    Other,
}

/// The event of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventKind {
    Unrecorded,
    /// Recorded before, and complete.
    Done,
    /// Done, and without times.
    Untimed,
    /// Recorded on the stream in its state: pending, or part of the capture.
    InState,
}

impl EventKind {
    fn name(self) -> &'static str {
        match self {
            Self::Unrecorded => "unrecorded",
            Self::Done => "done",
            Self::Untimed => "untimed",
            Self::InState => "in-state",
        }
    }
}

/// The bytes of the call and where they begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    /// 64 bytes.
    Few,
    None,
    One,
    /// All of a block.
    All,
    /// One byte more than the block has, or the least number of elements that exceeds it.
    PastEnd,
    /// From one byte behind the start.
    Unaligned,
    NullDestination,
    NullSource,
    /// No bytes at a null destination.
    NoneAtNull,
}

impl Size {
    const ALL: [Self; 8] = [
        Self::None,
        Self::One,
        Self::All,
        Self::PastEnd,
        Self::Unaligned,
        Self::NullDestination,
        Self::NullSource,
        Self::NoneAtNull,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Few => "64",
            Self::None => "0",
            Self::One => "1",
            Self::All => "all",
            Self::PastEnd => "past-end",
            Self::Unaligned => "unaligned",
            Self::NullDestination => "null-destination",
            Self::NullSource => "null-source",
            Self::NoneAtNull => "0-at-null",
        }
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::None | Self::NoneAtNull => 0,
            Self::One => 1,
            Self::All => SIZE,
            Self::PastEnd => SIZE + 4,
            Self::Few | Self::Unaligned | Self::NullDestination | Self::NullSource => 64,
        }
    }
}

/// A call with a value for each axis.
#[derive(Clone, Copy)]
pub(crate) struct Cell {
    pub(crate) number: usize,
    pub(crate) call: &'static Call,
    pub(crate) stream: Kind,
    pub(crate) state: State,
    pub(crate) thread: Thread,
    pub(crate) context: Context,
    pub(crate) event: Option<EventKind>,
    /// Destination and source.
    pub(crate) memory: (Memory, Memory),
    pub(crate) size: Size,
}

impl Cell {
    /// A call in the first value of each axis.
    pub(crate) fn first(call: &'static Call) -> Self {
        Self {
            number: 0,
            call,
            stream: Kind::Own,
            state: State::Idle,
            thread: Thread::Same,
            context: Context::Same,
            event: None,
            memory: DEFAULT_MEMORY,
            size: Size::Few,
        }
        .with_memory()
    }

    /// Gives copies to or from the host their memory.
    fn with_memory(mut self) -> Self {
        match self.call.sides {
            Sides::FromHost => self.memory.1 = Memory::Pinned,
            Sides::ToHost => self.memory.0 = Memory::Pinned,
            _ => {}
        }
        self
    }

    pub(crate) fn needs_two_devices(&self) -> bool {
        self.context == Context::Other || self.call.is_far
    }

    /// Returns the name, with each axis that concerns the call.
    pub(crate) fn name(&self) -> String {
        let mut name = format!("{} stream={} state={}", self.call.name, self.stream.name(), self.state.name());
        let thread = if self.thread == Thread::Same { "same" } else { "other" };
        let context = match self.context {
            Context::Same => "same",
            Context::None => "none",
            Context::Other => "other",
        };
        name.push_str(&format!(" thread={thread} context={context}"));
        if let Some(event) = self.event {
            name.push_str(&format!(" event={}", event.name()));
        }
        if self.call.sides != Sides::None {
            name.push_str(&format!(" to={}", self.memory.0.name()));
            if self.call.sides != Sides::Fill {
                name.push_str(&format!(" from={}", self.memory.1.name()));
            }
            name.push_str(&format!(" bytes={}", self.size.name()));
        }
        name
    }
}

const MODES: [u32; 3] = [GLOBAL, THREAD_LOCAL, RELAXED];

fn modes(of: fn(u32) -> State) -> impl Iterator<Item = State> {
    MODES.into_iter().map(of)
}

/// The states of a stream that a program created, in which an event may be recorded before the call.
fn usable() -> Vec<State> {
    let idle = [State::Idle, State::Busy, State::OtherBusy];
    idle.into_iter().chain(modes(State::Origin)).chain(modes(State::Member)).chain(modes(State::Beside)).collect()
}

fn of_stream(kind: Kind) -> Vec<State> {
    let few = [State::Idle, State::Busy, State::Origin(THREAD_LOCAL)];
    match kind {
        Kind::Own => usable().into_iter().chain(modes(State::Lost)).chain([State::AfterLost(THREAD_LOCAL)]).collect(),
        Kind::Low | Kind::High => few.to_vec(),
        Kind::Blocking | Kind::PerThread => {
            let more = [State::Member(RELAXED), State::Beside(THREAD_LOCAL), State::Lost(GLOBAL)];
            few.into_iter().chain(more).collect()
        }
        Kind::Legacy => {
            let idle = [State::Idle, State::Busy, State::OtherBusy];
            idle.into_iter().chain(modes(State::Beside)).chain(modes(State::BesideBlocking)).collect()
        }
        Kind::LegacyNumber => vec![State::Idle, State::OtherBusy, State::BesideBlocking(THREAD_LOCAL)],
    }
}

/// The states of calls without a stream of their own.
fn surroundings() -> Vec<State> {
    [State::Idle, State::Busy].into_iter().chain(modes(State::Beside)).collect()
}

const THREADS: [Thread; 2] = [Thread::Same, Thread::Other];

/// Returns every cell of the table, in a fixed order.
pub(crate) fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    for call in STREAM_CALLS.iter().chain(COPY_CALLS) {
        let first = Cell::first(call);
        let kinds =
            [Kind::Own, Kind::Blocking, Kind::Low, Kind::High, Kind::Legacy, Kind::LegacyNumber, Kind::PerThread];
        for stream in kinds.into_iter().filter(|kind| kind.is_created() || !call.destroys) {
            for state in of_stream(stream) {
                let threads = if stream == Kind::Own { &THREADS[..] } else { &THREADS[..1] };
                cells.extend(threads.iter().map(|&thread| Cell { stream, state, thread, ..first }));
            }
        }
        for (stream, state) in [
            (Kind::Own, State::Idle),
            (Kind::Own, State::Origin(RELAXED)),
            (Kind::Legacy, State::Idle),
            (Kind::PerThread, State::Idle),
        ] {
            if stream.is_created() || !call.destroys {
                cells.push(Cell { stream, state, context: Context::None, ..first });
                if !call.depends_on_loading {
                    cells.push(Cell { stream, state, context: Context::Other, ..first });
                }
            }
        }
    }
    events(&mut cells);
    memory(&mut cells);
    for call in PLAIN_CALLS {
        let first = Cell::first(call);
        for state in surroundings() {
            cells.extend(THREADS.iter().map(|&thread| Cell { state, thread, ..first }));
        }
        cells.extend([Context::None, Context::Other].map(|context| Cell { context, ..first }));
    }
    for call in ARGUMENT_CALLS {
        let first = Cell::first(call);
        cells.extend([Context::Same, Context::None].map(|context| Cell { context, ..first }));
        cells.push(Cell { state: State::Beside(THREAD_LOCAL), ..first });
    }
    for (number, cell) in cells.iter_mut().enumerate() {
        cell.number = number;
    }
    cells
}

fn events(cells: &mut Vec<Cell>) {
    let others = [EventKind::Unrecorded, EventKind::Done, EventKind::Untimed];
    for call in EVENT_CALLS {
        for state in usable() {
            let in_state = matches!(state, State::Busy | State::Origin(_) | State::Member(_));
            let kinds = others.into_iter().chain(in_state.then_some(EventKind::InState));
            for event in kinds {
                // Events without times answer as those with times, except in some calls in the first states.
                if event == EventKind::Untimed && !matches!(state, State::Idle | State::Origin(RELAXED)) {
                    continue;
                }
                let first = Cell { state, event: Some(event), ..Cell::first(call) };
                cells.extend(THREADS.map(|thread| Cell { thread, ..first }));
                if state == State::Idle {
                    cells.extend([Context::None, Context::Other].map(|context| Cell { context, ..first }));
                }
            }
        }
    }
}

fn memory(cells: &mut Vec<Cell>) {
    let states = [State::Idle, State::Busy, State::Origin(THREAD_LOCAL)];
    for call in COPY_CALLS {
        let (to, from): (&[Memory], &[Memory]) = match call.sides {
            Sides::Any => (&Memory::ALL, &Memory::ALL),
            Sides::FromHost => (&Memory::OF_DEVICE, &Memory::OF_HOST),
            Sides::ToHost => (&Memory::OF_HOST, &Memory::OF_DEVICE),
            Sides::OnDevice => (&Memory::OF_DEVICE, &Memory::OF_DEVICE),
            Sides::Fill => (&Memory::OF_DEVICE, &[Memory::Plain]),
            Sides::None => (&[], &[]),
        };
        let first = Cell::first(call);
        for &to in to {
            for &from in from {
                let memory = (to, from);
                // These cells are in the table of streams.
                if memory != first.memory {
                    cells.extend(states.map(|state| Cell { state, memory, ..first }));
                }
            }
        }
        for size in Size::ALL {
            let reads_null = match call.sides {
                Sides::FromHost => matches!(size, Size::NullSource),
                Sides::ToHost => matches!(size, Size::NullDestination),
                Sides::Fill => matches!(size, Size::NullSource),
                _ => false,
            };
            if !reads_null {
                cells.extend([State::Idle, State::Origin(THREAD_LOCAL)].map(|state| Cell { state, size, ..first }));
            }
        }
    }
}
