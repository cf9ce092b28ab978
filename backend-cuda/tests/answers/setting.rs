//! The setting of a cell: the objects of its call, the state of the stream, and the end of the cell.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::need;

use crate::calls::{Handle, Heuristic, blas, cu, ok};
use crate::cells::{Cell, Context, EventKind, Kind, Size, State, Thread};
use crate::memory::{Blocks, FILLED, Memory, SIZE};
use crate::plan::Plan;
use crate::rig::{Gate, event, memory, start, stream, warm};
use crate::table::Call;

/// The time after which a call counts as waiting, while a stream is blocked.
const PASSES_WITHIN: Duration = Duration::from_millis(150);
const WORKSPACE: usize = 4 << 20;

pub(crate) const GLOBAL: u32 = 0;
pub(crate) const THREAD_LOCAL: u32 = 1;
pub(crate) const RELAXED: u32 = 2;

/// The objects that all cells of a process share. Cells leave them as they were.
pub(crate) struct Rig {
    pub(crate) context: Handle,
    /// The context of the second device, if there is one.
    pub(crate) other: Option<Handle>,
    pub(crate) count: i32,
    /// The stream on which the rig itself works.
    pub(crate) stage: Handle,
    pub(crate) blocks: Blocks,
    /// A block of the second device.
    pub(crate) far: u64,
    workspace: u64,
    /// A complete event.
    done: Handle,
}

impl Rig {
    pub(crate) fn new() -> Answer<Self> {
        let context = start(0)?;
        let mut count = 0;
        ok!(cu cuDeviceGetCount(&mut count));
        let (mut other, mut far) = (None, 0);
        if count >= 2 {
            other = Some(start(1)?);
            far = memory(SIZE)?;
            warm(stream()?)?;
            ok!(cu cuCtxSetCurrent(context));
        }
        let (stage, done) = (stream()?, event(0)?);
        warm(stage)?;
        ok!(cu cuEventRecord(done, stage));
        ok!(cu cuStreamSynchronize(stage));
        let rig = Self {
            context,
            other,
            count,
            stage,
            blocks: Blocks::new(stage)?,
            far,
            workspace: memory(WORKSPACE)?,
            done,
        };
        rig.blocks.reset_all(rig.stage)?;
        // Kernels are loaded by the first product of a kind, which must not happen behind a gate or in a capture.
        for call in crate::table::STREAM_CALLS.iter().chain(crate::table::COPY_CALLS).filter(|call| call.launches) {
            let mut things = Things::new(&rig, &Cell::first(call))?;
            (call.prepare)(&mut things)?;
            need(call.name, (call.call)(&things))?;
            ok!(cu cuStreamSynchronize(things.stream));
            (call.finish)(&things)?;
            things.end()?;
        }
        Ok(rig)
    }

    pub(crate) fn name(&self) -> Answer<String> {
        let mut name = [0 as c_char; 128];
        ok!(cu cuDeviceGetName(name.as_mut_ptr(), 128, 0));
        // SAFETY: the driver ends the name with a zero within the array.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Waits for every device. Returns the first code that is not 0.
    fn synchronize(&self) -> u32 {
        let first = cu!(cuCtxSynchronize());
        let Some(other) = self.other else { return first };
        let bound = cu!(cuCtxSetCurrent(other));
        let second = cu!(cuCtxSynchronize());
        let back = cu!(cuCtxSetCurrent(self.context));
        [first, bound, second, back].into_iter().find(|code| *code != 0).unwrap_or(0)
    }

    /// Returns why this process is unfit for further cells, if so.
    pub(crate) fn spoilt(&self) -> Option<String> {
        let code = self.synchronize();
        if code != 0 {
            return Some(format!("cuCtxSynchronize {code}"));
        }
        // A capture of this thread that was left open refuses this.
        let code = cu!(cuEventQuery(self.done));
        (code != 0).then(|| format!("cuEventQuery {code}"))
    }
}

/// The objects of one cell. Calls that need others make them in `prepare`.
pub(crate) struct Things<'r> {
    pub(crate) rig: &'r Rig,
    /// The stream of the call.
    pub(crate) stream: Handle,
    /// The stream that the capture begins on, or 0. It may be that of the call.
    pub(crate) origin: Handle,
    capturing: bool,
    is_recording: bool,
    /// A stream that has nothing to do with the others.
    pub(crate) side: Handle,
    /// The event of the call.
    pub(crate) event: Handle,
    /// A complete event, with times.
    pub(crate) done: Handle,
    pub(crate) dst: u64,
    pub(crate) src: u64,
    pub(crate) bytes: usize,
    pub(crate) graph: Handle,
    pub(crate) executable: Handle,
    pub(crate) blas: Handle,
    pub(crate) lt: Option<(Plan, Heuristic)>,
    /// An address or handle that `prepare` made.
    pub(crate) given: u64,
    /// The object that the call made, or 0.
    pub(crate) made: AtomicU64,
    /// Whether the call has destroyed the stream.
    pub(crate) is_gone: AtomicBool,
    /// Whether the call has destroyed the event.
    pub(crate) is_event_gone: AtomicBool,
    /// The value that the call returned beside its code.
    pub(crate) note: AtomicU64,
    gate: Option<Gate>,
    owned: Vec<Handle>,
    pub(crate) events: Vec<Handle>,
}

/// The `note` of a call that returns no value.
pub(crate) const NOTHING: u64 = u64::MAX;

impl<'r> Things<'r> {
    fn new(rig: &'r Rig, cell: &Cell) -> Answer<Self> {
        let mut owned = Vec::new();
        let stream = match cell.stream {
            Kind::Legacy => 0,
            Kind::LegacyNumber => 1,
            Kind::PerThread => 2,
            kind => {
                let (mut made, mut least, mut greatest) = (0, 0, 0);
                ok!(cu cuCtxGetStreamPriorityRange(&mut least, &mut greatest));
                let (flags, priority) = match kind {
                    Kind::Blocking => (0, 0),
                    Kind::Low => (1, least),
                    Kind::High => (1, greatest),
                    _ => (1, 0),
                };
                ok!(cu cuStreamCreateWithPriority(&mut made, flags, priority));
                owned.push(made);
                made
            }
        };
        let side = crate::rig::stream()?;
        owned.push(side);
        let done = event(0)?;
        ok!(cu cuEventRecord(done, rig.stage));
        let called = event(if cell.event == Some(EventKind::Untimed) { 2 } else { 0 })?;
        if matches!(cell.event, Some(EventKind::Done | EventKind::Untimed)) {
            ok!(cu cuEventRecord(called, rig.stage));
        }
        ok!(cu cuStreamSynchronize(rig.stage));
        let (dst, src) = cell.memory;
        let things = Self {
            rig,
            stream,
            origin: 0,
            capturing: false,
            is_recording: false,
            side,
            event: called,
            done,
            dst: match cell.size {
                Size::NullDestination | Size::NoneAtNull => 0,
                Size::Unaligned => rig.blocks.dst(dst) + 1,
                _ => rig.blocks.dst(dst),
            },
            src: if cell.size == Size::NullSource { 0 } else { rig.blocks.src(src) },
            bytes: cell.size.bytes(),
            graph: 0,
            executable: 0,
            blas: 0,
            lt: None,
            given: 0,
            made: AtomicU64::new(0),
            is_gone: AtomicBool::new(false),
            is_event_gone: AtomicBool::new(false),
            note: AtomicU64::new(NOTHING),
            gate: None,
            owned,
            events: vec![done, called],
        };
        let filled = if cell.size.bytes() > FILLED { SIZE } else { FILLED };
        rig.blocks.reset(cell.memory, filled, rig.stage)?;
        Ok(things)
    }

    fn stream_of(&mut self, flags: u32) -> Answer<Handle> {
        let mut made = 0;
        ok!(cu cuStreamCreate(&mut made, flags));
        self.owned.push(made);
        Ok(made)
    }

    fn event_of(&mut self) -> Answer<Handle> {
        let made = event(2)?;
        self.events.push(made);
        Ok(made)
    }

    pub(crate) fn with_blas(&mut self) -> Answer {
        need("cublasCreate", blas!(cublasCreate_v2(&mut self.blas)))?;
        need("cublasSetStream", blas!(cublasSetStream_v2(self.blas, self.stream)))?;
        need("cublasSetWorkspace", blas!(cublasSetWorkspace_v2(self.blas, self.rig.workspace, WORKSPACE)))
    }

    /// Brings the stream of the call into the state of the cell.
    fn enter(&mut self, cell: &Cell) -> Answer {
        let fork = self.event_of()?;
        match cell.state {
            State::Idle => {}
            State::Busy => self.gate = Some(Gate::on(self.stream)?),
            State::OtherBusy => {
                let is_legacy = matches!(cell.stream, Kind::Legacy | Kind::LegacyNumber);
                let other = self.stream_of(u32::from(!is_legacy))?;
                self.gate = Some(Gate::on(other)?);
            }
            State::Origin(mode) => {
                self.origin = self.stream;
                ok!(cu cuStreamBeginCapture_v2(self.origin, mode));
            }
            State::Member(mode) => {
                self.origin = self.stream_of(1)?;
                ok!(cu cuStreamBeginCapture_v2(self.origin, mode));
                ok!(cu cuEventRecord(fork, self.origin));
                ok!(cu cuStreamWaitEvent(self.stream, fork, 0));
            }
            State::Beside(mode) | State::BesideBlocking(mode) => {
                let flags = u32::from(matches!(cell.state, State::Beside(_)));
                self.origin = self.stream_of(flags)?;
                ok!(cu cuStreamBeginCapture_v2(self.origin, mode));
            }
            State::Lost(mode) | State::AfterLost(mode) => {
                self.origin = self.stream;
                ok!(cu cuStreamBeginCapture_v2(self.origin, mode));
                expect("a query of a stream that captures", cu!(cuStreamQuery(self.origin)), 900)?;
                if let State::AfterLost(_) = cell.state {
                    expect("the end of a lost capture", cu!(cuStreamEndCapture(self.origin, &mut 0)), 901)?;
                    self.origin = 0;
                }
            }
        }
        self.capturing = self.origin != 0;
        self.is_recording = matches!(cell.state, State::Origin(_) | State::Member(_));
        if cell.event == Some(EventKind::InState) {
            ok!(cu cuEventRecord(self.event, self.stream));
        }
        Ok(())
    }

    /// Destroys what the cell has left.
    fn end(self) -> Answer {
        let gone = self.is_gone.load(Ordering::Acquire);
        for stream in self.owned.iter().filter(|stream| !gone || **stream != self.stream) {
            ok!(cu cuStreamDestroy_v2(*stream));
        }
        let event_gone = self.is_event_gone.load(Ordering::Acquire);
        for event in self.events.iter().filter(|event| !event_gone || **event != self.event) {
            ok!(cu cuEventDestroy_v2(*event));
        }
        if self.executable != 0 {
            ok!(cu cuGraphExecDestroy(self.executable));
        }
        if self.graph != 0 {
            ok!(cu cuGraphDestroy(self.graph));
        }
        if self.blas != 0 {
            need("cublasDestroy", blas!(cublasDestroy_v2(self.blas)))?;
        }
        Ok(())
    }

    pub(crate) fn is_destroyed(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Whether the call's stream was part of a capture in the call, so that its work is in a graph.
    pub(crate) fn was_recorded(&self) -> bool {
        self.is_recording
    }

    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Acquire)
    }

    /// Keeps what a call has made, and passes its code on. A call that fails may leave anything in the place.
    pub(crate) fn keep(&self, code: u32, made: u64) -> u32 {
        if code == 0 {
            self.made.store(made, Ordering::Release);
        }
        code
    }

    /// Notes a value beside the code. A call that fails returns none.
    pub(crate) fn tell(&self, code: u32, value: u64) -> u32 {
        if code == 0 {
            self.note.store(value, Ordering::Release);
        }
        code
    }
}

fn expect(what: &str, seen: u32, expected: u32) -> Answer {
    if seen == expected { Ok(()) } else { Err(format!("{what} answered {seen}, not {expected}")) }
}

/// Makes the call of a cell. Returns its code, and whether it waited for the gate.
fn make(things: &Things<'_>, cell: &Cell, call: &Call) -> Answer<(u32, bool)> {
    let rig = things.rig;
    let bound = match cell.context {
        Context::Same => rig.context,
        Context::None => 0,
        Context::Other => rig.other.unwrap_or(0),
    };
    std::thread::scope(|scope| {
        let (done, wait) = channel::<()>();
        let timer = things.gate.as_ref().map(|gate| {
            scope.spawn(move || {
                let waits = wait.recv_timeout(PASSES_WITHIN) == Err(RecvTimeoutError::Timeout);
                if waits {
                    gate.open();
                }
                waits
            })
        });
        let bind_and_call = || match cu!(cuCtxSetCurrent(bound)) {
            0 => Ok((call.call)(things)),
            code => Err(format!("cuCtxSetCurrent answered {code}")),
        };
        let code = match cell.thread {
            Thread::Same => {
                let code = bind_and_call();
                ok!(cu cuCtxSetCurrent(rig.context));
                code
            }
            Thread::Other => scope.spawn(bind_and_call).join().unwrap_or_else(|_| Err("the call panicked".to_owned())),
        };
        drop(done);
        let waited = timer.is_some_and(|timer| timer.join().unwrap_or(false));
        Ok((code?, waited))
    })
}

/// Returns the status of a capture as text: none, active, lost, or the code of the query.
fn status(stream: Handle) -> (u32, String) {
    let mut status = 9;
    match cu!(cuStreamIsCapturing(stream, &mut status)) {
        0 => (status, status.to_string()),
        code => (u32::MAX, format!("code {code}")),
    }
}

/// Ends a capture and, if the call's work can be seen, launches what it recorded.
fn end_capture(things: &Things<'_>, stream: Handle, launches: bool) -> Answer<String> {
    let mut graph = 0;
    let code = cu!(cuStreamEndCapture(stream, &mut graph));
    let mut text = format!(", end {code}");
    if graph == 0 {
        return Ok(text);
    }
    let mut kinds = crate::table::nodes(graph)?;
    kinds.dedup();
    let names: Vec<_> = kinds.iter().map(ToString::to_string).collect();
    text.push_str(&format!(" nodes [{}]", names.join(" ")));
    if launches && code == 0 && !kinds.is_empty() {
        let mut executable = 0;
        match cu!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)) {
            0 => {
                text.push_str(&format!(" launch {}", cu!(cuGraphLaunch(executable, things.rig.stage))));
                ok!(cu cuStreamSynchronize(things.rig.stage));
                ok!(cu cuGraphExecDestroy(executable));
            }
            code => text.push_str(&format!(" instantiate {code}")),
        }
    }
    ok!(cu cuGraphDestroy(graph));
    Ok(text)
}

/// Sets a cell up, makes its call, and describes the outcome.
pub(crate) fn answer(rig: &Rig, cell: &Cell) -> String {
    if cell.needs_two_devices() && rig.other.is_none() {
        return crate::record::LEFT_OUT.to_owned();
    }
    attempt(rig, cell).unwrap_or_else(|error| format!("is not set up: {error}"))
}

fn attempt(rig: &Rig, cell: &Cell) -> Answer<String> {
    let call = cell.call;
    let mut things = Things::new(rig, cell)?;
    (call.prepare)(&mut things)?;
    things.enter(cell)?;
    let (code, waited) = make(&things, cell, call)?;
    // Some drivers see only in a launch that a copy leaves its block, and lose the context.
    let launches = call.launches && !matches!(cell.size, Size::PastEnd | Size::NullDestination | Size::NullSource);
    let mut text = code.to_string();
    let note = things.note.load(Ordering::Acquire);
    if note != NOTHING {
        text.push_str(&format!(" gives {note}"));
    }
    if waited {
        text.push_str(", waits");
    }
    // A default stream is that of the context that is current.
    let is_elsewhere = cell.context == Context::Other && !cell.stream.is_created();
    let home = if is_elsewhere { rig.other.unwrap_or(rig.context) } else { rig.context };
    ok!(cu cuCtxSetCurrent(home));
    let ended = ended(&mut things, cell, waited, launches);
    ok!(cu cuCtxSetCurrent(rig.context));
    text.push_str(&ended?);
    // Work of the other thread's own stream, and of a destroyed one.
    let code = rig.synchronize();
    if code != 0 {
        return Ok(format!("{text}, cuCtxSynchronize {code}"));
    }
    let finished = (call.finish)(&things)?;
    if !finished.is_empty() {
        text.push_str(&format!(", {finished}"));
    }
    things.end()?;
    Ok(text)
}

/// Describes the stream after the call, lets its work go on, and ends the capture.
fn ended(things: &mut Things<'_>, cell: &Cell, waited: bool, launches: bool) -> Answer<String> {
    let mut text = String::new();
    let gone = things.is_destroyed();
    let mut is_capturing = false;
    // The question itself would end a capture of a blocking stream.
    if !gone && !matches!(cell.state, State::BesideBlocking(_)) {
        let (value, status) = status(things.stream);
        is_capturing = value == 1 || value == 2;
        if things.capturing || value != 0 {
            text.push_str(&format!(", status {status}"));
        }
    }
    if things.capturing && things.origin != things.stream {
        text.push_str(&format!(", origin {}", status(things.origin).1));
    }
    if cell.state == State::Busy && !waited && !is_capturing && !gone {
        text.push_str(&format!(", query {}", cu!(cuStreamQuery(things.stream))));
    }
    if let Some(gate) = &things.gate {
        gate.open();
    }
    if things.is_recording && things.origin != things.stream && !gone {
        let join = things.event_of()?;
        let recorded = cu!(cuEventRecord(join, things.stream));
        let joined = if recorded == 0 { cu!(cuStreamWaitEvent(things.origin, join, 0)) } else { recorded };
        if joined != 0 {
            text.push_str(&format!(", join {joined}"));
        }
    }
    if things.capturing && !(gone && things.origin == things.stream) {
        text.push_str(&end_capture(things, things.origin, launches)?);
    }
    // The call began a capture of its own.
    if is_capturing && !things.is_recording && things.origin != things.stream {
        text.push_str(&end_capture(things, things.stream, launches)?);
    }
    if !gone {
        let code = cu!(cuStreamSynchronize(things.stream));
        if code != 0 {
            text.push_str(&format!(", sync {code}"));
        }
    }
    Ok(text)
}

/// Returns a block's first and last byte that the call could have written, and one behind them.
pub(crate) fn seen_bytes(things: &Things<'_>, at: u64, bytes: usize) -> Answer<String> {
    let seen = things.rig.blocks.read(at, bytes.clamp(1, SIZE - 1) + 1, things.rig.stage)?;
    let behind = seen.last().copied().unwrap_or(0);
    let mut inside: Vec<u8> = seen[..seen.len() - 1].to_vec();
    inside.dedup();
    inside.truncate(4);
    let text: Vec<String> = inside.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("bytes {} behind {behind:02x}", text.join(" ")))
}

/// The memory of a cell that names none.
pub(crate) const DEFAULT_MEMORY: (Memory, Memory) = (Memory::Plain, Memory::Plain);
