//! The commands of a case to the second process.

/// A command. Its numbers, bytes and descriptors travel in the same message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Command {
    Begin,
    Allocate,
    Free,
    ExportMemory,
    OpenMemory,
    CloseMemory,
    Read,
    Write,
    Fill,
    Copy,
    StreamLoad,
    LetOthersBegin,
    SynchronizeStream,
    QueryStream,
    CreateEvent,
    ExportEvent,
    OpenEvent,
    DestroyEvent,
    RecordEvent,
    WaitForEvent,
    QueryEvent,
    SynchronizeEvent,
    LiveObjects,
    Fork,
    Exit,
    End,
}

impl Command {
    /// Every command, in the order of their codes.
    const ALL: [Self; 26] = [
        Self::Begin,
        Self::Allocate,
        Self::Free,
        Self::ExportMemory,
        Self::OpenMemory,
        Self::CloseMemory,
        Self::Read,
        Self::Write,
        Self::Fill,
        Self::Copy,
        Self::StreamLoad,
        Self::LetOthersBegin,
        Self::SynchronizeStream,
        Self::QueryStream,
        Self::CreateEvent,
        Self::ExportEvent,
        Self::OpenEvent,
        Self::DestroyEvent,
        Self::RecordEvent,
        Self::WaitForEvent,
        Self::QueryEvent,
        Self::SynchronizeEvent,
        Self::LiveObjects,
        Self::Fork,
        Self::Exit,
        Self::End,
    ];

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    pub(super) const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the command in words, for messages.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Begin => "open the backend",
            Self::Allocate => "allocate",
            Self::Free => "free",
            Self::ExportMemory => "export_memory",
            Self::OpenMemory => "open_memory",
            Self::CloseMemory => "close_memory",
            Self::Read => "read memory",
            Self::Write => "write memory",
            Self::Fill => "fill",
            Self::Copy => "copy",
            Self::StreamLoad => "keep its stream busy",
            Self::LetOthersBegin => "let its stream begin",
            Self::SynchronizeStream => "synchronize_stream",
            Self::QueryStream => "query_stream",
            Self::CreateEvent => "create_event",
            Self::ExportEvent => "export_event",
            Self::OpenEvent => "open_event",
            Self::DestroyEvent => "destroy_event",
            Self::RecordEvent => "record_event",
            Self::WaitForEvent => "stream_wait_event",
            Self::QueryEvent => "query_event",
            Self::SynchronizeEvent => "synchronize_event",
            Self::LiveObjects => "count live objects",
            Self::Fork => "fork",
            Self::Exit => "exit",
            Self::End => "end",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_commands_belong_together() {
        for (code, command) in Command::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(command.code()), code);
            assert_eq!(Command::from_code(command.code()), Some(command));
        }
        assert_eq!(Command::from_code(Command::ALL.len() as u8), None);
    }
}
