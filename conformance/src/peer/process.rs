//! The side of the case: starts the second process, sends commands, and ends it.

use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use highwater_hal::numbers::Coded;
use highwater_hal::{
    Backend, Completion, DevicePtr, EventHandle, LiveObjects, MemoryHandle, Result as BackendResult, Transport,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::command::Command;
use super::launcher::Launcher;
use super::wire::{self, Message};
use crate::case::{CaseResult, Failure};
use crate::stream_load::Direction;

/// The answer of the second process: the backend's result there, or a failure if no answer came.
pub(crate) type Answer<T> = Result<BackendResult<T>, Failure>;

/// The time limit of an answer. It is far longer than any call, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// An event of the second process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerEvent(u64);

/// A second process with the same backend. It has one stream, on the device that the case names.
///
/// If dropped, it is killed and waited for. [`Peer::end`] ends it in an orderly way and checks that no object is left.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    socket: OwnedFd,
    ended: bool,
    before: LiveObjects,
    patience: Duration,
}

impl Peer {
    /// Starts the process. It finds the device by its UUID.
    #[track_caller]
    pub(crate) fn start(launcher: &Launcher, backend: &dyn Backend, device: u32) -> Result<Self, Failure> {
        let uuid = backend.device_info(device)?.uuid;
        let (child, socket) = launcher.start().map_err(|error| {
            Failure::new(format!("the second process (`{}`) cannot be started: {error}", launcher.describe()))
        })?;
        let mut peer = Self { child, socket, ended: false, before: LiveObjects::default(), patience: PATIENCE };
        peer.ask(Command::Begin, |message| message.with_bytes(&uuid))??;
        peer.before = peer.live_objects()??;
        Ok(peer)
    }

    /// Sends a command and waits for its answer.
    #[track_caller]
    fn ask(&mut self, command: Command, with: impl FnOnce(Message) -> Message) -> Answer<Message> {
        let name = command.name();
        if let Err(error) = wire::send(&self.socket, &with(Message::new(command.code()))) {
            return Err(self.lost(&format!("before it was asked to `{name}` ({error})")));
        }
        if !self.answers_within(self.patience) {
            self.kill()?;
            let patience = self.patience;
            return Err(Failure::new(format!(
                "the second process did not answer to `{name}` within {patience:?} and was killed for it"
            )));
        }
        match wire::receive(&self.socket) {
            Ok(Some(answer)) => match answer.code {
                wire::DONE => Ok(Ok(answer)),
                wire::REFUSED => Ok(Err(answer.into_error(name))),
                _ => Err(Failure::new(format!(
                    "the second process could not `{name}`: {}",
                    String::from_utf8_lossy(&answer.bytes)
                ))),
            },
            Ok(None) => Err(self.lost(&format!("when it was asked to `{name}`"))),
            Err(error) => Err(self.lost(&format!("or sent nonsense when it was asked to `{name}` ({error})"))),
        }
    }

    /// Waits until the socket is readable or closed.
    fn answers_within(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).expect("a few seconds fit");
            match rustix::event::poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(0) if left.is_zero() => return false,
                Ok(0) => {}
                // A read reports the error of the socket again.
                _ => return true,
            }
        }
    }

    /// Describes how the process ended.
    #[track_caller]
    fn lost(&mut self, when: &str) -> Failure {
        let ended = match self.kill() {
            Ok(status) => status.to_string(),
            Err(failure) => failure.to_string(),
        };
        Failure::new(format!("the second process ended {when}: {ended}"))
    }

    /// Kills the process by SIGKILL, unless it has ended, and waits for it.
    #[track_caller]
    pub(crate) fn kill(&mut self) -> Result<ExitStatus, Failure> {
        self.ended = true;
        // An error means that the process has ended. Its status must still be read.
        let _ = self.child.kill();
        self.child.wait().map_err(|error| Failure::new(format!("the second process cannot be waited for: {error}")))
    }

    /// Ends the process. It gives back all objects first, and none may then be left.
    #[track_caller]
    pub(crate) fn end(mut self) -> CaseResult {
        let left = self.ask(Command::End, |message| message)??;
        let left = left.live_objects().ok_or_else(|| Failure::new("the second process counts its objects wrongly"))?;
        if left != self.before {
            return Err(Failure::new(format!(
                "live objects of the second process differ at its end: {:?} before, {left:?} after",
                self.before
            )));
        }
        self.ends_well()
    }

    /// Lets the process exit with all its objects.
    #[track_caller]
    pub(crate) fn exit(mut self) -> CaseResult {
        self.ask(Command::Exit, |message| message)??;
        self.ends_well()
    }

    /// Returns whether the backend of the process reports an exit.
    #[track_caller]
    pub(crate) fn is_exiting(&mut self) -> Answer<bool> {
        Ok(self.number(Command::IsExiting, |message| message)?.map(|answer| answer != 0))
    }

    /// Makes the process exit with all its objects. Returns whether the backend then reports the exit, and the first call that it does not
    /// refuse, or an empty text.
    #[track_caller]
    pub(crate) fn exit_and_tell(mut self) -> Result<(bool, String), Failure> {
        let read =
            |answer: &Message| Some((answer.number(0)? != 0, String::from_utf8_lossy(&answer.bytes).into_owned()));
        let answers = self.value(Command::ExitAndTell, |message| message, read)??;
        self.ends_well()?;
        Ok(answers)
    }

    /// Waits for a process that has the command to end.
    #[track_caller]
    fn ends_well(&mut self) -> CaseResult {
        let deadline = Instant::now() + self.patience;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.ended = true;
                    return if status.success() {
                        Ok(())
                    } else {
                        Err(Failure::new(format!("the second process was told to end and failed: {status}")))
                    };
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(Failure::new(format!("the second process cannot be waited for: {error}"))),
            }
        }
        self.kill()?;
        let patience = self.patience;
        Err(Failure::new(format!("the second process did not end within {patience:?} and was killed for it")))
    }

    /// Sends a command whose answer carries a value, which `read` finds in it.
    #[track_caller]
    fn value<T>(
        &mut self,
        command: Command,
        with: impl FnOnce(Message) -> Message,
        read: impl FnOnce(&Message) -> Option<T>,
    ) -> Answer<T> {
        match self.ask(command, with)? {
            Ok(answer) => read(&answer).map(Ok).ok_or_else(|| misfit(command)),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Sends a command whose result is one number.
    #[track_caller]
    fn number(&mut self, command: Command, with: impl FnOnce(Message) -> Message) -> Answer<u64> {
        self.value(command, with, |answer| answer.number(0))
    }

    #[track_caller]
    fn done(&mut self, command: Command, with: impl FnOnce(Message) -> Message) -> Answer<()> {
        Ok(self.ask(command, with)?.map(drop))
    }

    // ------------------------------------------------------------------ memory

    /// Allocates memory that `transport` can share.
    #[track_caller]
    pub(crate) fn allocate(&mut self, bytes: usize, transport: Transport) -> Answer<DevicePtr> {
        let numbers = [bytes as u64, u64::from(transport.code())];
        Ok(self.number(Command::Allocate, |m| m.with_numbers(numbers))?.map(DevicePtr::new))
    }

    /// Creates mapped memory that can be exported.
    #[track_caller]
    pub(crate) fn allocate_mapped(&mut self, bytes: usize, transport: Transport) -> Answer<DevicePtr> {
        let numbers = [bytes as u64, u64::from(transport.code())];
        Ok(self.number(Command::AllocateMapped, |m| m.with_numbers(numbers))?.map(DevicePtr::new))
    }

    /// Frees memory of [`Peer::allocate`].
    #[track_caller]
    pub(crate) fn free(&mut self, ptr: DevicePtr) -> Answer<()> {
        self.done(Command::Free, |m| m.with_numbers([ptr.get()]))
    }

    #[track_caller]
    pub(crate) fn export(&mut self, ptr: DevicePtr, transport: Transport) -> Answer<MemoryHandle> {
        let numbers = [ptr.get(), u64::from(transport.code())];
        self.value(Command::ExportMemory, |m| m.with_numbers(numbers), Message::memory_handle)
    }

    #[track_caller]
    pub(crate) fn open(&mut self, handle: &MemoryHandle) -> Answer<DevicePtr> {
        Ok(self.number(Command::OpenMemory, |m| m.with_memory_handle(handle))?.map(DevicePtr::new))
    }

    /// Imports mapped memory, and maps it. [`Peer::free`] ends it.
    #[track_caller]
    pub(crate) fn import(&mut self, handle: &MemoryHandle) -> Answer<DevicePtr> {
        Ok(self.number(Command::ImportMemory, |m| m.with_memory_handle(handle))?.map(DevicePtr::new))
    }

    /// Closes any address, even one that is not open.
    #[track_caller]
    pub(crate) fn close(&mut self, ptr: DevicePtr) -> Answer<()> {
        self.done(Command::CloseMemory, |m| m.with_numbers([ptr.get()]))
    }

    /// Reads bytes through the stream, and waits for it.
    #[track_caller]
    pub(crate) fn read(&mut self, ptr: DevicePtr, bytes: usize) -> Answer<Vec<u8>> {
        let mut read = Vec::with_capacity(bytes);
        while read.len() < bytes {
            let part = wire::MOST_BYTES.min(bytes - read.len());
            let from = ptr.offset(read.len()).get();
            match self.ask(Command::Read, |m| m.with_numbers([from, part as u64]))? {
                Ok(answer) if answer.bytes.len() == part => read.extend_from_slice(&answer.bytes),
                Ok(_) => return Err(misfit(Command::Read)),
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(read))
    }

    /// Writes bytes through the stream, and waits for it.
    #[track_caller]
    pub(crate) fn write(&mut self, ptr: DevicePtr, bytes: &[u8]) -> Answer<()> {
        for (index, part) in bytes.chunks(wire::MOST_BYTES).enumerate() {
            let to = ptr.offset(index * wire::MOST_BYTES).get();
            if let Err(error) = self.done(Command::Write, |m| m.with_numbers([to]).with_bytes(part))? {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }

    /// Enqueues a fill.
    #[track_caller]
    pub(crate) fn fill(&mut self, ptr: DevicePtr, bytes: usize, byte: u8) -> Answer<()> {
        self.done(Command::Fill, |m| m.with_numbers([ptr.get(), bytes as u64, u64::from(byte)]))
    }

    /// Enqueues a copy.
    #[track_caller]
    pub(crate) fn copy(&mut self, dst: DevicePtr, src: DevicePtr, bytes: usize) -> Answer<()> {
        self.done(Command::Copy, |m| m.with_numbers([dst.get(), src.get(), bytes as u64]))
    }

    // ------------------------------------------------------------------ the stream

    /// Enqueues a [`crate::stream_load::StreamLoad`].
    #[track_caller]
    pub(crate) fn busy(&mut self, direction: Direction, load: usize) -> Answer<()> {
        let direction = u64::from(direction == Direction::ToHost);
        self.done(Command::StreamLoad, |m| m.with_numbers([direction, load as u64]))
    }

    /// Waits longer than another stream of the process needs to begin.
    #[track_caller]
    pub(crate) fn let_others_begin(&mut self) -> Answer<()> {
        self.done(Command::LetOthersBegin, |m| m)
    }

    #[track_caller]
    pub(crate) fn synchronize_stream(&mut self) -> Answer<()> {
        self.done(Command::SynchronizeStream, |m| m)
    }

    #[track_caller]
    pub(crate) fn query_stream(&mut self) -> Answer<Completion> {
        self.value(Command::QueryStream, |m| m, Message::completion)
    }

    // ------------------------------------------------------------------ events

    /// Creates an event, which other processes can open if requested.
    #[track_caller]
    pub(crate) fn create_event(&mut self, interprocess: bool) -> Answer<PeerEvent> {
        Ok(self.number(Command::CreateEvent, |m| m.with_numbers([u64::from(interprocess)]))?.map(PeerEvent))
    }

    #[track_caller]
    pub(crate) fn export_event(&mut self, event: PeerEvent) -> Answer<EventHandle> {
        self.value(Command::ExportEvent, |m| m.with_numbers([event.0]), Message::event_handle)
    }

    #[track_caller]
    pub(crate) fn open_event(&mut self, handle: &EventHandle) -> Answer<PeerEvent> {
        Ok(self.number(Command::OpenEvent, |m| m.with_event_handle(handle))?.map(PeerEvent))
    }

    #[track_caller]
    pub(crate) fn destroy_event(&mut self, event: PeerEvent) -> Answer<()> {
        self.done(Command::DestroyEvent, |m| m.with_numbers([event.0]))
    }

    #[track_caller]
    pub(crate) fn record(&mut self, event: PeerEvent) -> Answer<()> {
        self.done(Command::RecordEvent, |m| m.with_numbers([event.0]))
    }

    #[track_caller]
    pub(crate) fn wait_for(&mut self, event: PeerEvent) -> Answer<()> {
        self.done(Command::WaitForEvent, |m| m.with_numbers([event.0]))
    }

    #[track_caller]
    pub(crate) fn query_event(&mut self, event: PeerEvent) -> Answer<Completion> {
        self.value(Command::QueryEvent, |m| m.with_numbers([event.0]), Message::completion)
    }

    #[track_caller]
    pub(crate) fn synchronize_event(&mut self, event: PeerEvent) -> Answer<()> {
        self.done(Command::SynchronizeEvent, |m| m.with_numbers([event.0]))
    }

    // ------------------------------------------------------------------ the process

    #[track_caller]
    pub(crate) fn live_objects(&mut self) -> Answer<LiveObjects> {
        self.value(Command::LiveObjects, |m| m, Message::live_objects)
    }

    /// Lets the process fork a child that does nothing and ends when this value is dropped.
    #[track_caller]
    pub(crate) fn fork(&mut self) -> Answer<()> {
        self.done(Command::Fork, |m| m)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.kill();
        }
    }
}

#[track_caller]
fn misfit(command: Command) -> Failure {
    let name = command.name();
    Failure::new(format!(
        "the second process answered `{name}` with something else: is it another version of the suite?"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a peer whose process is a shell.
    fn impostor(script: &str) -> Peer {
        let launcher = Launcher::new("/bin/sh").with_arguments(["-c", script]);
        let (child, socket) = launcher.start().unwrap();
        let patience = Duration::from_secs(30);
        Peer { child, socket, ended: false, before: LiveObjects::default(), patience }
    }

    fn text<T>(answer: Answer<T>) -> String {
        match answer {
            Err(failure) => failure.to_string(),
            Ok(_) => panic!("an impostor answered"),
        }
    }

    #[test]
    fn a_process_that_ends_is_told_with_its_status() {
        let said = text(impostor("exit 3").synchronize_stream());
        assert!(said.contains("ended") && said.contains("`synchronize_stream`"), "{said}");
        assert!(said.contains('3'), "{said}");
        let said = text(impostor("kill -9 $$").synchronize_stream());
        assert!(said.contains("signal: 9"), "{said}");
    }

    fn id(peer: &Peer) -> rustix::process::Pid {
        rustix::process::Pid::from_raw(peer.child.id() as i32).unwrap()
    }

    /// Checks that not even a zombie has the number.
    fn is_gone(id: rustix::process::Pid) -> bool {
        rustix::process::test_kill_process(id) == Err(rustix::io::Errno::SRCH)
    }

    #[test]
    fn a_process_that_does_not_answer_is_killed() {
        let mut peer = impostor("exec sleep 1000");
        peer.patience = Duration::from_millis(20);
        let said = text(peer.synchronize_stream());
        assert!(said.contains("`synchronize_stream` within 20ms") && said.contains("killed"), "{said}");
        assert!(is_gone(id(&peer)));
    }

    #[test]
    fn a_process_that_a_case_forgets_is_killed() {
        let peer = impostor("exec sleep 1000");
        let id = id(&peer);
        assert!(!is_gone(id));
        drop(peer);
        assert!(is_gone(id));
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = Launcher::new("/nowhere/at/all").start().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
}
