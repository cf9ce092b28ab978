//! The commands of a case to the second process.

macro_rules! commands {
    ($($command:ident $name:literal,)+) => {
        /// A command. Its numbers, bytes and descriptors travel in the same message.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub(super) enum Command {
            $($command,)+
        }

        impl Command {
            /// Every command, in the order of their codes.
            const ALL: &[Self] = &[$(Self::$command),+];

            /// Returns the command in words, for messages.
            pub(super) const fn name(self) -> &'static str {
                match self {
                    $(Self::$command => $name,)+
                }
            }
        }
    };
}

commands! {
    Begin "open the backend",
    Allocate "allocate",
    AllocateMapped "allocate mapped memory",
    Free "free",
    ExportMemory "export_memory",
    OpenMemory "open_memory",
    ImportMemory "import_memory",
    CloseMemory "close_memory",
    Read "read memory",
    Write "write memory",
    Fill "fill",
    Copy "copy",
    StreamLoad "keep its stream busy",
    LetOthersBegin "let its stream begin",
    SynchronizeStream "synchronize_stream",
    QueryStream "query_stream",
    CreateEvent "create_event",
    ExportEvent "export_event",
    OpenEvent "open_event",
    DestroyEvent "destroy_event",
    RecordEvent "record_event",
    WaitForEvent "stream_wait_event",
    QueryEvent "query_event",
    SynchronizeEvent "synchronize_event",
    LiveObjects "count live objects",
    Fork "fork",
    IsExiting "is_exiting",
    ExitAndTell "tell at its exit whether it exits",
    Exit "exit",
    End "end",
}

impl Command {
    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    pub(super) const fn code(self) -> u8 {
        self as u8
    }
}
