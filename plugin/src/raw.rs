//! What crosses the table: C structs of fixed-width integers, doubles, pointers and texts of fixed room.
//!
//! Every struct that is handed over by a pointer begins with its size in bytes, as `uint64_t`; [`RawId`], [`RawLocation`] and
//! [`RawGemmShape`] stand inside of others, have none, and never grow. Fields are only ever added at the end. Each struct carries a description of itself, from which the header and the layout test are made.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;

/// One field of a struct that crosses, as C sees it.
#[derive(Debug, Clone)]
pub(super) struct Field {
    /// Its name.
    pub(super) name: &'static str,
    /// Its declaration in C.
    pub(super) declaration: String,
    /// What it says.
    pub(super) doc: String,
    /// Bytes from the beginning of the struct.
    pub(super) offset: usize,
    /// Its bytes.
    pub(super) bytes: usize,
}

/// A struct that crosses, as C sees it.
#[derive(Debug, Clone)]
pub(super) struct Struct {
    /// Its name in C.
    pub(super) name: &'static str,
    /// What it is.
    pub(super) doc: String,
    /// Its fields, in order.
    pub(super) fields: Vec<Field>,
    /// Its bytes.
    pub(super) bytes: usize,
}

/// The lines of a documentation, without the blank in front of each.
pub(super) fn text_of(lines: &[&str]) -> String {
    lines.iter().map(|line| line.strip_prefix(' ').unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// How a type is declared in C.
pub(super) trait CType {
    /// The declaration of `name` with this type.
    fn declare(name: &str) -> String;
}

macro_rules! plain {
    ($($type:ty => $c:literal),* $(,)?) => {$(
        impl CType for $type {
            fn declare(name: &str) -> String {
                let space = if $c.ends_with('*') { "" } else { " " };
                format!("{}{space}{name}", $c)
            }
        }
    )*};
}

plain! {
    u32 => "uint32_t",
    i32 => "int32_t",
    u64 => "uint64_t",
    i64 => "int64_t",
    f64 => "double",
    *mut c_void => "void *",
    *mut *mut c_void => "void **",
    *mut u32 => "uint32_t *",
    *mut u64 => "uint64_t *",
    *mut RawBackend => "hw_backend *",
    *mut RawHandle => "hw_handle *",
    *mut *mut RawHandle => "hw_handle **",
    *const c_char => "const char *",
    Option<LogCall> => "hw_log_call",
    Option<OpenCall> => "hw_open_call",
    Option<TableCall> => "hw_table_call",
}

impl<const N: usize> CType for [u8; N] {
    fn declare(name: &str) -> String {
        format!("uint8_t {name}[{N}]")
    }
}

/// A text with room for `N` bytes, the NUL at its end included.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Text<const N: usize>(pub(super) [u8; N]);

impl<const N: usize> CType for Text<N> {
    fn declare(name: &str) -> String {
        format!("char {name}[{N}]")
    }
}

impl<const N: usize> Text<N> {
    /// No text.
    pub(super) const EMPTY: Self = Self([0; N]);

    /// As much of `text` as there is room for, cut between characters.
    pub(super) fn new(text: &str) -> Self {
        let mut bytes = [0; N];
        let mut end = text.len().min(N - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
        Self(bytes)
    }

    /// The text up to its NUL; bytes that are no UTF-8 are replaced.
    ///
    /// # Errors
    /// Where there is no NUL.
    pub(super) fn read(&self) -> Result<String, String> {
        let end = self.0.iter().position(|&byte| byte == 0).ok_or(format!("a text without a NUL in its {N} bytes"))?;
        Ok(String::from_utf8_lossy(&self.0[..end]).into_owned())
    }

    /// The text, cut at its room where it has no NUL.
    pub(super) fn read_cut(&self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(N);
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }
}

impl<const N: usize> std::fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.read_cut().fmt(f)
    }
}

/// A struct that crosses behind a pointer and says its own size first.
///
/// # Safety
/// `#[repr(C)]`, its first field is `size: u64`, any bytes are a valid value, and it has no padding.
pub(super) unsafe trait Sized64: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Its bytes in the first version of the table, below which none can be.
    const FIRST_BYTES: usize;
}

/// Far more than any struct will have.
pub(super) const MOST_BYTES: u64 = 1 << 16;

/// Reads a struct of whoever is on the other side, where it lies. A shorter one means zeros for the rest; a longer one has to be
/// zero where this side does not know it. One of another size is read into `spare`.
///
/// # Errors
/// What is wrong with it.
///
/// # Safety
/// `pointer` is null, or there are as many readable bytes as its first eight say, and at least these. Nobody writes them as long
/// as the answer is used.
#[inline]
pub(super) unsafe fn read_sized<T: Sized64>(pointer: *const T, spare: &mut MaybeUninit<T>) -> Result<&T, String> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(format!("a pointer to `{}` that is null or not aligned", T::NAME));
    }
    // SAFETY: the struct begins with its size, and the pointer is good for that (the caller vouches).
    let bytes = unsafe { pointer.cast::<u64>().read() };
    if bytes == size_of::<T>() as u64 {
        // Not copied: wide loads of what was just stored in pieces would wait for those stores.
        // SAFETY: there are so many bytes, any bytes are a value (`Sized64`), and nobody writes them (the caller vouches).
        return Ok(unsafe { &*pointer });
    }
    // SAFETY: as above; `bytes` is what it says.
    unsafe { read_other(pointer, bytes, spare) }
}

/// [`read_sized`] for a struct of another version.
///
/// # Safety
/// `pointer` is aligned, and there are `bytes` readable bytes, if no more than [`MOST_BYTES`].
#[cold]
unsafe fn read_other<T: Sized64>(pointer: *const T, bytes: u64, spare: &mut MaybeUninit<T>) -> Result<&T, String> {
    if bytes < T::FIRST_BYTES as u64 || bytes > MOST_BYTES {
        let (name, least) = (T::NAME, T::FIRST_BYTES);
        return Err(format!("a `{name}` that says it has {bytes} bytes; expected are {least} or more"));
    }
    let (given, known) = (bytes as usize, size_of::<T>());
    // SAFETY: there are so many bytes, and nobody writes them during the call.
    let given = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), given) };
    if let Some(place) = given.iter().skip(known).position(|&byte| byte != 0) {
        return Err(format!("a `{}` that uses byte {}, which this side does not know", T::NAME, known + place));
    }
    *spare = MaybeUninit::zeroed();
    let common = given.len().min(known);
    // SAFETY: both have `common` bytes, and they are apart.
    unsafe { std::ptr::copy_nonoverlapping(given.as_ptr(), spare.as_mut_ptr().cast::<u8>(), common) };
    // SAFETY: all bytes are initialised, and any bytes are a value (`Sized64`).
    Ok(unsafe { spare.assume_init_ref() })
}

/// Writes an answer into the struct of the caller, as far as that reaches; its size becomes what was written.
///
/// # Errors
/// What is wrong with the caller's struct.
///
/// # Safety
/// `pointer` is null, or there are as many writable bytes as its first eight say, and at least these.
pub(super) unsafe fn write_sized<T: Sized64>(pointer: *mut T, value: &T) -> Result<(), String> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(format!("a pointer to `{}` that is null or not aligned", T::NAME));
    }
    // SAFETY: the struct begins with its size, and the pointer is good for that (the caller vouches).
    let room = unsafe { pointer.cast::<u64>().read() };
    if room < T::FIRST_BYTES as u64 || room > MOST_BYTES {
        return Err(format!("room of {room} bytes for a `{}`; expected are {} or more", T::NAME, T::FIRST_BYTES));
    }
    let written = (room as usize).min(size_of::<T>());
    // SAFETY: the caller has room for so many bytes, and `value` has as many.
    unsafe { std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), pointer.cast::<u8>(), written) };
    // SAFETY: the first eight bytes are the size.
    unsafe { pointer.cast::<u64>().write(written as u64) };
    Ok(())
}

/// Defines structs that cross, and the description of each.
macro_rules! raw_structs {
    ($($(#[doc = $doc:literal])+ $rust:ident $c:literal $(sized $first:literal)? {
        $($(#[doc = $field_doc:literal])+ $field:ident: $type:ty,)+
    })+) => {
        $(
            $(#[doc = $doc])+
            #[derive(Debug, Clone, Copy)]
            #[repr(C)]
            pub struct $rust {
                $($(#[doc = $field_doc])+ pub $field: $type,)+
            }

            impl CType for $rust {
                fn declare(name: &str) -> String {
                    format!("{} {name}", $c)
                }
            }

            impl CType for *const $rust {
                fn declare(name: &str) -> String {
                    format!("const {} *{name}", $c)
                }
            }

            impl CType for *mut $rust {
                fn declare(name: &str) -> String {
                    format!("{} *{name}", $c)
                }
            }

            const _: () = {
                // Without padding, every byte is a field's.
                let mut bytes = 0;
                $(bytes += size_of::<$type>();)+
                assert!(bytes == size_of::<$rust>(), "a struct that crosses has padding");
                $(assert!($first <= size_of::<$rust>(), "a struct that crosses is smaller than its first version");)?
            };

            $(
                // SAFETY: it is `repr(C)` with `size` first; its fields are integers, doubles, texts, pointers, nullable
                // function pointers and structs of those; and the assertion above holds.
                unsafe impl Sized64 for $rust {
                    const NAME: &'static str = $c;
                    const FIRST_BYTES: usize = $first;
                }
            )?
        )+

        /// Every struct that crosses but the table, in an order in which C can read them.
        pub(super) fn structs() -> Vec<Struct> {
            vec![$(Struct {
                name: $c,
                doc: text_of(&[$($doc),+]),
                fields: vec![$(Field {
                    name: stringify!($field),
                    declaration: <$type as CType>::declare(stringify!($field)),
                    doc: text_of(&[$($field_doc),+]),
                    offset: std::mem::offset_of!($rust, $field),
                    bytes: size_of::<$type>(),
                }),+],
                bytes: size_of::<$rust>(),
            }),+]
        }
    };
}

/// An open backend, of which only the plugin knows what it is.
#[derive(Debug)]
#[repr(C)]
pub struct RawBackend {
    private: [u8; 0],
}

/// A BLAS or an Lt handle, of which only the plugin knows what it is.
#[derive(Debug)]
#[repr(C)]
pub struct RawHandle {
    private: [u8; 0],
}

/// Takes a log line: level (`HW_LOG_...`), text, bytes of the text.
pub type LogCall = unsafe extern "C" fn(level: u32, text: *const c_char, bytes: u64);
/// Opens the backend.
pub type OpenCall =
    unsafe extern "C" fn(request: *const RawOpen, backend: *mut *mut RawBackend, error: *mut RawError) -> i32;
/// Gives the table of a version, which is one of those that the plugin named.
pub type TableCall = unsafe extern "C" fn(version: u32) -> *const super::table::Table;

raw_structs! {
    /// A stream, an event, a graph or an executable graph. The backend issues it and checks it whenever it comes back: a
    /// stale, foreign or forged one is HW_ERROR_INVALID_HANDLE, and nothing happens.
    RawId "hw_id" {
        /// Place in a table of the backend, below HW_FIRST_NAMED_SLOT; or a default stream, HW_SLOT_...
        slot: u32,
        /// Which object of that place, from 1: grows each time the place is used again.
        generation: u32,
        /// The tag that the program gave when it opened the backend; in every id.
        tag: u32,
        /// Ordinal of the device that the object belongs to.
        device: u32,
    }

    /// What went wrong, filled by the callee where it answers another code than 0. The caller has set `size` and emptied
    /// the rest.
    RawError "hw_error" sized 792 {
        /// Bytes of this struct.
        size: u64,
        /// The vendor's own code, where `has_vendor_code` is 1.
        vendor_code: i64,
        /// Whether there is one: 0 or 1.
        has_vendor_code: u32,
        /// Zero.
        reserved: u32,
        /// What was wrong and what was expected; UTF-8 with a NUL.
        message: Text<512>,
        /// What to do about it, or nothing.
        hint: Text<256>,
    }

    /// What the program offers a plugin; valid for the life of the process.
    RawHost "hw_host" sized 24 {
        /// Bytes of this struct.
        size: u64,
        /// Lowest version of the table that the program takes.
        version_min: u32,
        /// Highest version of the table that the program takes.
        version_max: u32,
        /// Takes log lines, from any thread; may be null.
        log: Option<LogCall>,
    }

    /// What opens a backend.
    RawOpen "hw_open" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// The version of the table that was agreed on.
        version: u32,
        /// The tag of every id that this backend issues; not 0. Another one each time a backend is opened.
        tag: u32,
    }

    /// What a plugin is; it stays valid and unchanged for the life of the process. The texts are UTF-8 with a NUL.
    RawPlugin "hw_plugin" sized 64 {
        /// Bytes of this struct.
        size: u64,
        /// Lowest version of the table that the plugin has.
        version_min: u32,
        /// Highest version of the table that the plugin has.
        version_max: u32,
        /// The name under which it is opened: letters, digits, `-` and `_`, at most 63.
        name: *const c_char,
        /// What it drives, for people.
        description: *const c_char,
        /// Who made it.
        vendor: *const c_char,
        /// Its own version.
        version: *const c_char,
        /// Opens the backend. May be called again, for a second one.
        open: Option<OpenCall>,
        /// Gives the table of a version.
        table: Option<TableCall>,
    }

    /// Who a backend is.
    RawIdentity "hw_identity" sized 3408 {
        /// Bytes of this struct.
        size: u64,
        /// Whether there is real hardware behind it: 0 or 1.
        real_device: u32,
        /// Zero.
        reserved: u32,
        /// The name under which it is opened.
        name: Text<64>,
        /// What it drives, for people.
        description: Text<256>,
        /// Versions of the backend and of each vendor library: a line `what<TAB>version` for each.
        versions: Text<2048>,
        /// Environment variables, first set one wins, that size the BLAS workspace as `:KiB:COUNT` pairs: one on a line.
        blas_workspace_variables: Text<512>,
        /// Environment variables, first set one wins, that size the Lt workspace in KiB: one on a line.
        lt_workspace_variables: Text<512>,
    }

    /// What a device is.
    RawDeviceInfo "hw_device_info" sized 400 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes of memory.
        memory_bytes: u64,
        /// Ordinal within this process.
        ordinal: u32,
        /// NUMA node, where `has_numa_node` is 1.
        numa_node: u32,
        /// Whether the NUMA node is known: 0 or 1.
        has_numa_node: u32,
        /// Zero.
        reserved: u32,
        /// Identifies the device across processes; the same over the life of the machine.
        uuid: [u8; 16],
        /// The vendor's name for it.
        name: Text<256>,
        /// PCI address as `domain:bus:device.function`, or empty.
        pci_address: Text<32>,
        /// The vendor's architecture: `sm_90`, `gfx942`.
        architecture: Text<64>,
    }

    /// What a device can do and how it behaves.
    RawCapabilities "hw_capabilities" sized 64 {
        /// Bytes of this struct.
        size: u64,
        /// What it can do: HW_CAN_... . A program ignores what it does not know.
        abilities: u64,
        /// How it behaves: HW_FACT_... .
        facts: u64,
        /// Ways in which its memory can be shared: 1 shifted left by HW_TRANSPORT_..., for each.
        ipc_transports: u32,
        /// Zero.
        reserved: u32,
        /// Bytes that the program registers at a time when it makes large blocks of page-locked memory itself; 0: never.
        register_piece_bytes: u64,
        /// Alignment in bytes that a BLAS workspace must have; a power of two.
        workspace_alignment: u64,
        /// Bytes of workspace that a BLAS handle works best with.
        blas_workspace_bytes: u64,
        /// Bytes of workspace that an Lt plan may use by default.
        lt_workspace_bytes: u64,
    }

    /// Free and total memory of a device, in bytes.
    RawMemoryInfo "hw_memory_info" sized 24 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes that can be allocated now.
        free: u64,
        /// Bytes that the device has.
        total: u64,
    }

    /// What a backend's objects that are alive come to; all zero when everything was given back.
    RawLiveObjects "hw_live_objects" sized 80 {
        /// Bytes of this struct.
        size: u64,
        /// Streams made by `create_stream`.
        streams: u64,
        /// Events made by `create_event` or opened.
        events: u64,
        /// BLAS and Lt handles.
        handles: u64,
        /// Blocks of device memory.
        allocations: u64,
        /// Blocks of page-locked host memory, allocated or registered.
        host_allocations: u64,
        /// Graphs and executable graphs.
        graphs: u64,
        /// Memory of other processes that is mapped here.
        mappings: u64,
        /// File descriptors made for sharing.
        descriptors: u64,
        /// Shared files made for sharing.
        shared_files: u64,
    }

    /// How to make a stream.
    RawStreamOptions "hw_stream_options" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// HW_STREAM_PRIORITY_... .
        priority: u32,
        /// Zero.
        reserved: u32,
    }

    /// How to make an event.
    RawEventOptions "hw_event_options" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// Whether `event_elapsed_ns` may be asked: 0 or 1.
        timing: u32,
        /// Whether another process may open it: 0 or 1.
        interprocess: u32,
    }

    /// How to allocate device memory.
    RawAllocateOptions "hw_allocate_options" sized 40 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes to allocate; 0 is HW_ERROR_INVALID_ARGUMENT.
        bytes: u64,
        /// HW_DEVICE_MEMORY_... .
        kind: u32,
        /// HW_TRANSPORT_..., for HW_DEVICE_MEMORY_SHAREABLE; else 0.
        transport: u32,
        /// The stream, for HW_DEVICE_MEMORY_STREAM_ORDERED; else zeros.
        stream: RawId,
    }

    /// How to make page-locked memory.
    RawHostOptions "hw_host_options" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// HW_HOST_MEMORY_... .
        kind: u32,
        /// Zero.
        reserved: u32,
    }

    /// One side of a copy.
    RawLocation "hw_location" {
        /// HW_LOCATION_... .
        kind: u32,
        /// Ordinal of the device, for HW_LOCATION_DEVICE; else 0.
        device: u32,
        /// The address there.
        address: u64,
    }

    /// A copy of bytes; source and destination do not overlap.
    RawMemoryCopy "hw_memory_copy" sized 48 {
        /// Bytes of this struct.
        size: u64,
        /// Where to.
        dst: RawLocation,
        /// Where from.
        src: RawLocation,
        /// Bytes to copy; 0 copies nothing and is no error.
        bytes: u64,
    }

    /// A fill of device memory with one element.
    RawMemoryFill "hw_memory_fill" sized 40 {
        /// Bytes of this struct.
        size: u64,
        /// First byte; a multiple of the element's size.
        dst: u64,
        /// How many elements; 0 fills nothing and is no error.
        count: u64,
        /// Ordinal of the device.
        device: u32,
        /// Bytes of the element: 1, 2 or 4.
        pattern_bytes: u32,
        /// The element, in the lowest bytes.
        pattern: u32,
        /// Zero.
        reserved: u32,
    }

    /// Shape of `C = alpha * op(A) * op(B) + beta * C`: op(A) is m x k, op(B) is k x n, C is m x n, all column-major.
    RawGemmShape "hw_gemm_shape" {
        /// Element type of A and B: HW_DATA_TYPE_... .
        data_type: u32,
        /// Element type of C, D and the bias: HW_DATA_TYPE_... .
        output: u32,
        /// Whether op(A) is A transposed: 0 or 1.
        transpose_a: u32,
        /// Whether op(B) is B transposed: 0 or 1.
        transpose_b: u32,
        /// Rows of C.
        m: u64,
        /// Columns of C.
        n: u64,
        /// Columns of op(A) and rows of op(B).
        k: u64,
        /// Leading dimension of A, in elements.
        lda: u64,
        /// Leading dimension of B, in elements.
        ldb: u64,
        /// Leading dimension of C, in elements.
        ldc: u64,
        /// Whether there are several products at equal distances: 0 or 1.
        has_batch: u32,
        /// Zero.
        reserved: u32,
        /// How many products, with `has_batch`.
        batch_count: u64,
        /// Elements from one A to the next; 0 uses the same A in each product.
        stride_a: u64,
        /// Elements from one B to the next; 0 uses the same B in each product.
        stride_b: u64,
        /// Elements from one C to the next; the Cs do not overlap.
        stride_c: u64,
    }

    /// One matrix product.
    RawGemm "hw_gemm" sized 152 {
        /// Bytes of this struct.
        size: u64,
        /// Sizes, leading dimensions, batch.
        shape: RawGemmShape,
        /// Factor of the product.
        alpha: f64,
        /// Factor of the old C; with 0 the old C is not read.
        beta: f64,
        /// First element of A.
        a: u64,
        /// First element of B.
        b: u64,
        /// First element of C.
        c: u64,
    }

    /// Device memory for the intermediate results of products.
    RawWorkspace "hw_workspace" sized 32 {
        /// Bytes of this struct.
        size: u64,
        /// First byte.
        address: u64,
        /// Bytes of the memory.
        bytes: u64,
        /// Whether there is one: 0 for the handle's own, or 1.
        present: u32,
        /// Zero.
        reserved: u32,
    }

    /// What an Lt plan is made for.
    RawPlanOptions "hw_plan_options" sized 144 {
        /// Bytes of this struct.
        size: u64,
        /// Sizes, leading dimensions, batch.
        shape: RawGemmShape,
        /// Bytes of workspace that the plan may use.
        workspace_bytes: u64,
        /// Every operand's address is a multiple of this, in bytes.
        alignment: u64,
        /// HW_EPILOGUE_... .
        epilogue: u32,
        /// HW_MATH_MODE_... .
        math_mode: u32,
        /// HW_ATOMICS_MODE_... .
        atomics_mode: u32,
        /// Zero.
        reserved: u32,
    }

    /// Arguments of one run of an Lt plan: `D = epilogue(alpha * op(A) * op(B) + beta * C)`. D may be C.
    RawPlanArguments "hw_plan_arguments" sized 72 {
        /// Bytes of this struct.
        size: u64,
        /// Factor of the product.
        alpha: f64,
        /// Factor of C; with 0 C is not read.
        beta: f64,
        /// First element of A.
        a: u64,
        /// First element of B.
        b: u64,
        /// First element of C.
        c: u64,
        /// First element of D, laid out as C.
        d: u64,
        /// First element of the bias, where `has_bias` is 1.
        bias: u64,
        /// Whether there is a bias: 0 or 1.
        has_bias: u32,
        /// Zero.
        reserved: u32,
    }

    /// A handle of device memory for other processes.
    RawMemoryHandle "hw_memory_handle" sized 112 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes of the whole allocation.
        bytes: u64,
        /// HW_TRANSPORT_... .
        transport: u32,
        /// A file descriptor that travels beside the payload, or -1. In an answer it is the program's, which closes it; in
        /// an argument it stays the program's, and is not closed.
        descriptor: i32,
        /// UUID of the device that owns the memory.
        device_uuid: [u8; 16],
        /// The vendor's handle.
        payload: [u8; 64],
        /// In an answer with a descriptor: what `release_descriptor` is called with once the program has closed it; 0 for
        /// nothing.
        descriptor_token: u64,
    }

    /// A handle of an event for other processes.
    RawEventHandle "hw_event_handle" sized 104 {
        /// Bytes of this struct.
        size: u64,
        /// A file descriptor, as in `hw_memory_handle`.
        descriptor: i32,
        /// Zero.
        reserved: u32,
        /// UUID of the event's device.
        device_uuid: [u8; 16],
        /// The vendor's handle.
        payload: [u8; 64],
        /// As in `hw_memory_handle`.
        descriptor_token: u64,
    }
}

impl RawError {
    /// An error of which nothing was said.
    pub(super) const EMPTY: Self = Self {
        size: size_of::<Self>() as u64,
        vendor_code: 0,
        has_vendor_code: 0,
        reserved: 0,
        message: Text::EMPTY,
        hint: Text::EMPTY,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters_and_ends_with_a_nul() {
        let text = Text::<6>::new("größer");
        assert_eq!(text.read().unwrap(), "grö");
        assert_eq!(Text::<8>::new("größer").read().unwrap(), "größe");
        assert!(Text([b'a'; 4]).read().unwrap_err().contains("4 bytes"));
        assert_eq!(Text([b'a', 0xff, 0, 1]).read_cut(), "a\u{fffd}");
    }

    #[test]
    fn structs_of_other_versions_are_read_as_far_as_they_are_known() {
        #[repr(C)]
        struct Longer {
            known: RawStreamOptions,
            more: u64,
        }
        let known = RawStreamOptions { size: 24, priority: 2, reserved: 0 };
        let mut longer = Longer { known, more: 0 };
        let read = |options: *const RawStreamOptions| {
            let mut spare = MaybeUninit::uninit();
            // SAFETY: the structs are null, as long as they say, or say a size that is refused before more is read.
            unsafe { read_sized(options, &mut spare) }.map(|options| options.priority)
        };
        assert_eq!(read((&raw const longer).cast()).unwrap(), 2);
        longer.more = 1 << 8;
        let error = read((&raw const longer).cast()).unwrap_err();
        assert!(error.contains("byte 17"), "{error}");
        for size in [0, 15, u64::MAX] {
            let error = read(&RawStreamOptions { size, ..known }).unwrap_err();
            assert!(error.contains(&size.to_string()) && error.contains("hw_stream_options"), "{error}");
        }
        assert!(read(std::ptr::null()).is_err());
    }

    #[test]
    fn answers_are_written_as_far_as_the_caller_has_room() {
        let value = RawMemoryInfo { size: 24, free: 1, total: 2 };
        let mut room = RawMemoryInfo { size: 24, free: 0, total: 0 };
        // SAFETY: the room is as large as it says.
        unsafe { write_sized(&raw mut room, &value) }.unwrap();
        assert_eq!((room.size, room.free, room.total), (24, 1, 2));
        room.size = 8;
        // SAFETY: as above.
        assert!(unsafe { write_sized(&raw mut room, &value) }.unwrap_err().contains("room of 8 bytes"));
    }
}
