//! The side of the second process: executes the commands of the case until the end.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use highwater_hal::numbers::Coded;
use highwater_hal::{Backend, Completion, DeviceMemoryKind, DevicePtr, Error, ErrorKind, EventOptions, Result};
use rustix::process::Signal;

use super::command::Command;
use super::exit::{self, Objects};
use super::launcher::VARIABLE;
use super::wire::{self, Message};
use crate::device::{Block, Event, Span, Stream, close_unknown, read_span, write_span};
use crate::idle_stream::IdleStream;
use crate::stream_load::{Direction, StreamLoad};
use crate::validation::Validated;

const OPERATION: &str = "serve_peer";

/// Serves a case if one started this process, through a [`Launcher`](crate::Launcher); returns `None` otherwise.
///
/// Call it at the beginning of a program, or in the test that the launcher names. The backend opens when the case requests
/// it. After the return, the process has nothing more to do.
///
/// # Errors
///
/// The error of `open`, which the case receives too; `OperatingSystem` if standard input is not the socket of a case.
pub fn serve_peer(open: impl FnOnce() -> Result<Arc<dyn Backend>>) -> Option<Result<()>> {
    std::env::var_os(VARIABLE)?;
    Some(serve(open))
}

/// The state of the exit handler.
struct AtExit {
    /// The socket to which it reports whether the backend notices the exit.
    socket: OwnedFd,
    backend: Arc<dyn Backend>,
    /// The objects of the calls that it makes.
    objects: Objects,
}

static AT_EXIT: Mutex<Option<AtExit>> = Mutex::new(None);

extern "C" fn tell_at_exit() {
    let at_exit = AT_EXIT.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(AtExit { socket, backend, mut objects }) = at_exit {
        let notices = u64::from(backend.is_exiting());
        let wrong = exit::not_refused(&*backend, &mut objects).unwrap_or_default();
        // If the socket is broken, the case has failed already.
        let _ = wire::send(&socket, &Message::new(wire::DONE).with_numbers([notices]).with_bytes(wrong.as_bytes()));
        // Destructors do not run at an exit.
        std::mem::forget((backend, objects));
    }
}

fn serve(open: impl FnOnce() -> Result<Arc<dyn Backend>>) -> Result<()> {
    // The process must not outlive its case. If this call comes too late, the socket is already closed.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| broken(&error))?;
    let Some(begin) = wire::receive(&socket).map_err(|error| broken(&error))? else { return Ok(()) };
    // Handlers run in the reverse order of their registration. So this one runs after that of the backend.
    // SAFETY: the handler is an `extern "C"` function without arguments, in code that is never unloaded.
    if unsafe { libc::atexit(tell_at_exit) } != 0 {
        return answer(&socket, &Message::refusal(&confused("it has no room for a handler of its exit")));
    }
    let begun = match begin.code == Command::Begin.code() {
        true => open().and_then(crate::mutants::as_in_the_first_process),
        false => Err(confused("it was not told to begin")),
    };
    let backend = match begun {
        Ok(backend) => backend,
        Err(error) => {
            answer(&socket, &Message::refusal(&error))?;
            return Err(error);
        }
    };
    let validated = Validated::new(&*backend, None);
    let mut server =
        match device_of(&validated, &begin.bytes).and_then(|device| Server::new(&validated, &socket, device)) {
            Ok(server) => server,
            Err(error) => return answer(&socket, &Message::refusal(&error)),
        };
    answer(&socket, &Message::new(wire::DONE))?;
    while let Some(message) = wire::receive(&socket).map_err(|error| broken(&error))? {
        let Some(command) = Command::from_code(message.code) else {
            answer(&socket, &Message::new(wire::CONFUSED).with_bytes(b"it does not know this command"))?;
            continue;
        };
        if command == Command::ExitAndTell {
            let objects = match Objects::new(&*backend, server.device) {
                Ok(objects) => objects,
                Err(error) => return answer(&socket, &Message::refusal(&error)),
            };
            let socket = socket.try_clone().map_err(|error| broken(&error))?;
            *AT_EXIT.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(AtExit { socket, backend: Arc::clone(&backend), objects });
            // Exit handlers run; destructors do not.
            std::process::exit(0);
        }
        if command == Command::Exit {
            answer(&socket, &Message::new(wire::DONE))?;
            // Exit handlers run; destructors do not.
            std::process::exit(0);
        }
        if command == Command::End {
            drop(server);
            let findings = validated.findings();
            return if findings.is_empty() {
                answer(&socket, &Message::new(wire::DONE).with_live_objects(backend.live_objects()))
            } else {
                answer(&socket, &Message::new(wire::CONFUSED).with_bytes(findings.join("; ").as_bytes()))
            };
        }
        let reply = match server.perform(command, &message) {
            Ok(reply) => reply,
            Err(Trouble::Refused(error)) => Message::refusal(&error),
            Err(Trouble::Confused(why)) => Message::new(wire::CONFUSED).with_bytes(why.as_bytes()),
        };
        answer(&socket, &reply)?;
    }
    Ok(())
}

fn answer(socket: &OwnedFd, message: &Message) -> Result<()> {
    wire::send(socket, message).map_err(|error| broken(&error))
}

fn broken(error: &std::io::Error) -> Error {
    let message = format!("the socket of the case cannot be used: {error}");
    Error::new(ErrorKind::OperatingSystem, OPERATION, message)
        .with_code(i64::from(error.raw_os_error().unwrap_or_default()))
        .with_hint(format!("unset {VARIABLE} unless a case of the conformance suite started this process"))
}

fn confused(why: &str) -> Error {
    Error::new(ErrorKind::InvalidState, OPERATION, why)
}

/// Returns the device with this UUID. Its ordinal may differ from the one in the process of the case.
fn device_of(backend: &dyn Backend, uuid: &[u8]) -> Result<u32> {
    for device in 0..backend.device_count() {
        if backend.device_info(device)?.uuid == uuid {
            return Ok(device);
        }
    }
    Err(Error::new(
        ErrorKind::DeviceMissing,
        OPERATION,
        format!("no device has the UUID {uuid:x?} in a second process"),
    ))
}

/// The reason why a command has no result.
#[derive(Debug)]
enum Trouble {
    /// The backend returned an error.
    Refused(Error),
    /// The command is invalid.
    Confused(String),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// The objects that the second process made for the case.
struct Server<'b> {
    backend: &'b dyn Backend,
    socket: &'b OwnedFd,
    device: u32,
    stream: Stream<'b>,
    /// Lives longest: freeing its memory waits for the device.
    idle: IdleStream<'b>,
    /// By address. Memory that was opened several times has several entries.
    memory: BTreeMap<u64, Vec<Block<'b>>>,
    events: Vec<Option<Event<'b>>>,
    busy: BTreeMap<u64, StreamLoad<'b>>,
}

impl<'b> Server<'b> {
    fn new(backend: &'b dyn Backend, socket: &'b OwnedFd, device: u32) -> Result<Self> {
        let (stream, idle) = (Stream::on(backend, device)?, IdleStream::on(backend, device)?);
        let (memory, events, busy) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        Ok(Self { backend, socket, device, stream, idle, memory, events, busy })
    }

    fn perform(&mut self, command: Command, message: &Message) -> Result<Message, Trouble> {
        let number =
            |index| message.number(index).ok_or_else(|| Trouble::Confused(format!("number {index} is missing")));
        let size = |index| number(index).map(|number| number as usize);
        let done = Message::new(wire::DONE);
        let completion = |completion: Completion| [u64::from(completion.code())];
        Ok(match command {
            Command::Begin | Command::ExitAndTell | Command::Exit | Command::End => {
                return Err(Trouble::Confused("it has begun already".to_owned()));
            }
            Command::Allocate => {
                let kind = DeviceMemoryKind::Shareable(transport(number(1)?)?);
                let block = Block::with_kind(self.backend, self.device, size(0)?, kind)?;
                done.with_numbers([self.keep(block)])
            }
            Command::AllocateMapped => {
                let block = Block::mapped_for(self.backend, self.device, size(0)?, transport(number(1)?)?)?;
                done.with_numbers([self.keep(block)])
            }
            Command::Free => match self.take(number(0)?, false) {
                Some(own) => {
                    drop(own);
                    done
                }
                None => return Err(unknown(number(0)?)),
            },
            Command::ExportMemory => {
                let block = self.memory.get(&number(0)?).and_then(|blocks| blocks.last());
                let Some(own) = block.filter(|block| !block.is_opened()) else {
                    return Err(unknown(number(0)?));
                };
                done.with_memory_handle(&own.export(transport(number(1)?)?)?)
            }
            Command::OpenMemory => {
                let handle =
                    message.memory_handle().ok_or_else(|| Trouble::Confused("the handle is malformed".to_owned()))?;
                let block = Block::open(self.backend, self.device, &handle)?;
                done.with_numbers([self.keep(block)])
            }
            Command::ImportMemory => {
                let handle =
                    message.memory_handle().ok_or_else(|| Trouble::Confused("the handle is malformed".to_owned()))?;
                let block = Block::imported(self.backend, self.device, &handle)?;
                done.with_numbers([self.keep(block)])
            }
            Command::CloseMemory => {
                match self.take(number(0)?, true) {
                    Some(opened) => opened.give_back()?,
                    // The backend must refuse an address that is not open.
                    None => close_unknown(self.backend, self.device, DevicePtr::new(number(0)?))?,
                }
                done
            }
            Command::Read => {
                let span = self.span(number(0)?, size(1)?)?;
                done.with_bytes(&read_span(self.backend, self.device, span)?)
            }
            Command::Write => {
                let span = self.span(number(0)?, message.bytes.len())?;
                write_span(self.backend, self.device, span, &message.bytes)?;
                done
            }
            Command::Fill => {
                let span = self.span(number(0)?, size(1)?)?;
                self.stream.set(span, number(2)? as u8)?;
                done
            }
            Command::Copy => {
                let (dst, src) = (self.span(number(0)?, size(2)?)?, self.span(number(1)?, size(2)?)?);
                self.stream.copy(dst, src)?;
                done
            }
            Command::StreamLoad => {
                let direction = if number(0)? == 0 { Direction::ToDevice } else { Direction::ToHost };
                if !self.busy.contains_key(&number(0)?) {
                    self.busy.insert(number(0)?, StreamLoad::new(self.backend, self.device, direction)?);
                }
                self.busy[&number(0)?].enqueue(&self.stream, size(1)?)?;
                done
            }
            Command::LetOthersBegin => {
                self.idle.let_others_begin()?;
                done
            }
            Command::SynchronizeStream => {
                self.stream.synchronize()?;
                done
            }
            Command::QueryStream => done.with_numbers(completion(self.stream.query()?)),
            Command::CreateEvent => {
                let options = EventOptions::new();
                let options = if number(0)? == 0 { options } else { options.with_interprocess() };
                let event = Event::with_options(self.backend, self.device, &options)?;
                done.with_numbers([self.keep_event(event)])
            }
            Command::ExportEvent => done.with_event_handle(&self.event(number(0)?)?.export()?),
            Command::OpenEvent => {
                let handle =
                    message.event_handle().ok_or_else(|| Trouble::Confused("the handle is malformed".to_owned()))?;
                let event = Event::open(self.backend, self.device, &handle)?;
                done.with_numbers([self.keep_event(event)])
            }
            Command::DestroyEvent => {
                let event = self.events.get_mut(size(0)?).and_then(Option::take);
                event.ok_or_else(|| unknown_event(number(0).unwrap_or_default()))?.destroy()?;
                done
            }
            Command::RecordEvent => {
                self.stream.record(self.event(number(0)?)?)?;
                done
            }
            Command::WaitForEvent => {
                self.stream.wait(self.event(number(0)?)?)?;
                done
            }
            Command::QueryEvent => done.with_numbers(completion(self.event(number(0)?)?.query()?)),
            Command::SynchronizeEvent => {
                self.event(number(0)?)?.synchronize()?;
                done
            }
            Command::LiveObjects => {
                // Objects that this process uses itself do not count for the case.
                let mut live = self.backend.live_objects();
                live.streams -= 2;
                live.allocations -= 1 + self.busy.len() as u64;
                live.host_allocations -= self.busy.len() as u64;
                done.with_live_objects(live)
            }
            Command::IsExiting => done.with_numbers([u64::from(self.backend.is_exiting())]),
            Command::Fork => {
                self.fork()?;
                done
            }
        })
    }

    fn keep(&mut self, block: Block<'b>) -> u64 {
        let address = block.ptr().get();
        self.memory.entry(address).or_default().push(block);
        address
    }

    /// Takes a block at an address, own or opened.
    fn take(&mut self, address: u64, opened: bool) -> Option<Block<'b>> {
        let blocks = self.memory.get_mut(&address)?;
        let block = blocks.pop_if(|block| block.is_opened() == opened);
        if blocks.is_empty() {
            self.memory.remove(&address);
        }
        block
    }

    /// Returns the bytes at an address inside living memory.
    fn span(&self, address: u64, bytes: usize) -> Result<Span<'_>, Trouble> {
        let (start, blocks) = self.memory.range(..=address).next_back().ok_or_else(|| unknown(address))?;
        let (memory, offset) = (blocks.last().ok_or_else(|| unknown(address))?, (address - start) as usize);
        if offset.checked_add(bytes).is_none_or(|end| end > memory.bytes()) {
            return Err(unknown(address));
        }
        Ok(memory.span(offset..offset + bytes))
    }

    fn keep_event(&mut self, event: Event<'b>) -> u64 {
        self.events.push(Some(event));
        self.events.len() as u64 - 1
    }

    fn event(&self, number: u64) -> Result<&Event<'b>, Trouble> {
        self.events.get(number as usize).and_then(Option::as_ref).ok_or_else(|| unknown_event(number))
    }

    /// Forks a child that has the objects of this process, does nothing, and ends when the case closes its socket.
    fn fork(&self) -> Result<(), Trouble> {
        // The child also ends if the case forgets it.
        const LONGEST: Duration = Duration::from_secs(120);
        // SAFETY: the child makes system calls only, on a descriptor that it has inherited, and ends with `_exit`.
        match unsafe { libc::fork() } {
            -1 => Err(Trouble::Confused(format!("it cannot fork: {}", std::io::Error::last_os_error()))),
            0 => {
                let deadline = Instant::now() + LONGEST;
                let hung_up = |socket: &OwnedFd| {
                    let mut polled =
                        libc::pollfd { fd: std::os::fd::AsRawFd::as_raw_fd(socket), events: 0, revents: 0 };
                    // SAFETY: one entry, which lives through the call. Only the end of the other side is waited for.
                    unsafe { libc::poll(&mut polled, 1, 1000) };
                    polled.revents & libc::POLLHUP != 0
                };
                while !hung_up(self.socket) && Instant::now() < deadline {}
                // SAFETY: ends the child, and runs nothing of its parent's.
                unsafe { libc::_exit(0) }
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        // Work on the stream may use every other object.
        let _ = self.stream.synchronize();
    }
}

fn transport(number: u64) -> Result<highwater_hal::Transport, Trouble> {
    wire::decoded(number).ok_or_else(|| Trouble::Confused(format!("there is no transport {number}")))
}

fn unknown(address: u64) -> Trouble {
    Trouble::Confused(format!("it has no memory at {address:#x} that fits"))
}

fn unknown_event(number: u64) -> Trouble {
    Trouble::Confused(format!("it has no event {number}"))
}
