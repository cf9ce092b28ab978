//! The C structs of the table: fixed-width integers, doubles, pointers, and texts of a fixed size.
//!
//! Every struct that is passed by pointer begins with its size in bytes, as `uint64_t`. [`RawId`], [`RawLocation`] and
//! [`RawGemmShape`] are parts of other structs: they have no size and never grow. New fields are added at the end only. Each
//! struct has a description, from which the header and the layout test are made.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;

/// A field of a struct, as C declares it.
#[derive(Debug, Clone)]
pub(super) struct Field {
    /// Its name.
    pub(super) name: &'static str,
    /// Its declaration in C.
    pub(super) declaration: String,
    /// Its documentation.
    pub(super) doc: String,
    /// Bytes from the beginning of the struct.
    pub(super) offset: usize,
    /// Its bytes.
    pub(super) bytes: usize,
}

/// A struct, as C declares it.
#[derive(Debug, Clone)]
pub(super) struct Struct {
    /// Its name in C.
    pub(super) name: &'static str,
    /// Its documentation.
    pub(super) doc: String,
    /// Its fields, in order.
    pub(super) fields: Vec<Field>,
    /// Its bytes.
    pub(super) bytes: usize,
}

/// Joins the lines of a documentation, without the space at the start of each.
pub(super) fn text_of(lines: &[&str]) -> String {
    lines.iter().map(|line| line.strip_prefix(' ').unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// A type that C can declare.
pub(super) trait CType {
    /// Returns the C declaration of `name` with this type.
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

/// A text of at most `N` bytes, including the NUL at its end.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Text<const N: usize>(pub(super) [u8; N]);

impl<const N: usize> CType for Text<N> {
    fn declare(name: &str) -> String {
        format!("char {name}[{N}]")
    }
}

impl<const N: usize> Text<N> {
    /// The empty text.
    pub(super) const EMPTY: Self = Self([0; N]);

    /// Returns `text`, cut between characters if it is too long.
    pub(super) fn new(text: &str) -> Self {
        let mut bytes = [0; N];
        let mut end = text.len().min(N - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
        Self(bytes)
    }

    /// Returns the text up to its NUL. Replaces bytes that are not UTF-8.
    ///
    /// # Errors
    /// If there is no NUL.
    pub(super) fn read(&self) -> Result<String, String> {
        let end = self.0.iter().position(|&byte| byte == 0).ok_or(format!("a text without a NUL in its {N} bytes"))?;
        Ok(String::from_utf8_lossy(&self.0[..end]).into_owned())
    }

    /// Returns the text up to its NUL, or all of it if it has none.
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

/// A struct that is passed by pointer and begins with its size.
///
/// # Safety
/// The type must be `#[repr(C)]` without padding, its first field must be `size: u64`, and any bytes must be a valid value.
pub(super) unsafe trait Sized64: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Its bytes in the first version of the table, the smallest size that is accepted.
    const FIRST_BYTES: usize;
}

/// A limit far above the size of any struct.
pub(super) const MOST_BYTES: u64 = 1 << 16;

/// Reads a struct of the other side in place. The missing fields of a shorter struct are zero. The unknown bytes of a longer
/// struct must be zero. A struct of another size is copied to `spare`.
///
/// # Errors
/// A description of a struct that is invalid.
///
/// # Safety
/// `pointer` must be null, or its first eight bytes must be readable and give the number of readable bytes. The caller must
/// ensure that nothing writes them while the result is in use.
#[inline]
pub(super) unsafe fn read_sized<T: Sized64>(pointer: *const T, spare: &mut MaybeUninit<T>) -> Result<&T, String> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(format!("a pointer to `{}` that is null or not aligned", T::NAME));
    }
    // SAFETY: the struct begins with its size, which the caller lets this function read.
    let bytes = unsafe { pointer.cast::<u64>().read() };
    if bytes == size_of::<T>() as u64 {
        // Read in place: wide loads of bytes that were just stored in pieces would wait for those stores.
        // SAFETY: that many bytes are readable, any bytes are a value (`Sized64`), and the caller ensures that nothing writes them.
        return Ok(unsafe { &*pointer });
    }
    // SAFETY: as above, and `bytes` is the size that it states.
    unsafe { read_other(pointer, bytes, spare) }
}

/// [`read_sized`] for a struct of another version.
///
/// # Safety
/// `pointer` must be aligned. If `bytes` is at most [`MOST_BYTES`], that many bytes must be readable.
#[cold]
unsafe fn read_other<T: Sized64>(pointer: *const T, bytes: u64, spare: &mut MaybeUninit<T>) -> Result<&T, String> {
    if bytes < T::FIRST_BYTES as u64 || bytes > MOST_BYTES {
        let (name, least) = (T::NAME, T::FIRST_BYTES);
        return Err(format!("a `{name}` that says it has {bytes} bytes; expected are {least} or more"));
    }
    let (given, known) = (bytes as usize, size_of::<T>());
    // SAFETY: that many bytes are readable, and nothing writes them during the call.
    let given = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), given) };
    if let Some(place) = given.iter().skip(known).position(|&byte| byte != 0) {
        return Err(format!("a `{}` that uses byte {}, which this side does not know", T::NAME, known + place));
    }
    *spare = MaybeUninit::zeroed();
    let common = given.len().min(known);
    // SAFETY: both have `common` bytes and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(given.as_ptr(), spare.as_mut_ptr().cast::<u8>(), common) };
    // SAFETY: all bytes are initialized, and any bytes are a value (`Sized64`).
    Ok(unsafe { spare.assume_init_ref() })
}

/// Writes an answer into the caller's struct, up to the caller's size. Sets that size to the number of bytes written.
///
/// # Errors
/// A description of a struct that is invalid.
///
/// # Safety
/// `pointer` must be null, or its first eight bytes must be writable and give the number of writable bytes.
pub(super) unsafe fn write_sized<T: Sized64>(pointer: *mut T, value: &T) -> Result<(), String> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(format!("a pointer to `{}` that is null or not aligned", T::NAME));
    }
    // SAFETY: the struct begins with its size, which the caller lets this function read.
    let room = unsafe { pointer.cast::<u64>().read() };
    if room < T::FIRST_BYTES as u64 || room > MOST_BYTES {
        return Err(format!("room of {room} bytes for a `{}`; expected are {} or more", T::NAME, T::FIRST_BYTES));
    }
    let written = (room as usize).min(size_of::<T>());
    // SAFETY: the caller's struct and `value` both have that many bytes.
    unsafe { std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), pointer.cast::<u8>(), written) };
    // SAFETY: the first eight bytes are the size.
    unsafe { pointer.cast::<u64>().write(written as u64) };
    Ok(())
}

/// Defines the structs, and the description of each.
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

        /// Returns every struct but the table, in an order in which C can declare them.
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

/// An open backend. Only the plugin knows its contents.
#[derive(Debug)]
#[repr(C)]
pub struct RawBackend {
    private: [u8; 0],
}

/// A BLAS or an Lt handle. Only the plugin knows its contents.
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
/// A table, as the entry point returns it.
#[derive(Debug)]
#[repr(C)]
pub struct RawTable {
    private: [u8; 0],
}

/// Returns the table of a version, which is one of the plugin's versions.
pub type TableCall = unsafe extern "C" fn(version: u32) -> *const RawTable;

raw_structs! {
    /// The id of a stream, an event, a graph, an executable graph or physical memory. The backend issues it, and checks it in
    /// every call. A stale, foreign or forged id returns HW_ERROR_INVALID_HANDLE and has no effect.
    RawId "hw_id" {
        /// Index in a table of the backend, below HW_FIRST_NAMED_SLOT; or a default stream, HW_SLOT_...
        slot: u32,
        /// Number of the object at that index, from 1. It increases at each reuse of the index.
        generation: u32,
        /// The tag that the program passed when it opened the backend.
        tag: u32,
        /// Ordinal of the object's device.
        device: u32,
    }

    /// The details of an error. A function that returns another code than 0 fills it. The caller has set `size` and cleared
    /// the rest.
    RawError "hw_error" sized 792 {
        /// Bytes of this struct.
        size: u64,
        /// The vendor's code, if `has_vendor_code` is 1.
        vendor_code: i64,
        /// 1 if `vendor_code` is set, else 0.
        has_vendor_code: u32,
        /// Zero.
        reserved: u32,
        /// The fault, and the expected value; UTF-8 with a NUL, and not empty.
        message: Text<512>,
        /// A remedy, or empty.
        hint: Text<256>,
    }

    /// The program's offer to a plugin. Valid for the life of the process.
    RawHost "hw_host" sized 24 {
        /// Bytes of this struct.
        size: u64,
        /// Lowest version of the table that the program supports.
        version_min: u32,
        /// Highest version of the table that the program supports.
        version_max: u32,
        /// Receives log lines from any thread. May be null.
        log: Option<LogCall>,
    }

    /// A request to open a backend.
    RawOpen "hw_open" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// The version of the table that both sides use.
        version: u32,
        /// The tag of every id that this backend issues; not 0. Each open backend has its own.
        tag: u32,
    }

    /// The description of a plugin. Valid and unchanged for the life of the process. The texts are UTF-8 with a NUL.
    RawPlugin "hw_plugin" sized 64 {
        /// Bytes of this struct.
        size: u64,
        /// Lowest version of the table that the plugin supports.
        version_min: u32,
        /// Highest version of the table that the plugin supports.
        version_max: u32,
        /// The name that opens it: at most 63 letters, digits, `-` and `_`.
        name: *const c_char,
        /// The product that it drives, for people.
        description: *const c_char,
        /// Its maker.
        vendor: *const c_char,
        /// Its own version.
        version: *const c_char,
        /// Opens the backend. Each call opens another one.
        open: Option<OpenCall>,
        /// Returns the table of a version.
        table: Option<TableCall>,
    }

    /// The name and the versions of a backend.
    RawIdentity "hw_identity" sized 3408 {
        /// Bytes of this struct.
        size: u64,
        /// 1 if the backend drives real hardware, else 0.
        real_device: u32,
        /// Zero.
        reserved: u32,
        /// The name that opens it.
        name: Text<64>,
        /// The product that it drives, for people.
        description: Text<256>,
        /// Versions of the backend and of each vendor library: a line `what<TAB>version` for each.
        versions: Text<2048>,
        /// Environment variables that size the BLAS workspace as `:KiB:COUNT` pairs: one on a line, the first one set counts.
        blas_workspace_variables: Text<512>,
        /// Environment variables that size the Lt workspace in KiB: one on a line, the first one set counts.
        lt_workspace_variables: Text<512>,
    }

    /// A description of one device.
    RawDeviceInfo "hw_device_info" sized 400 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes of memory.
        memory_bytes: u64,
        /// Ordinal within this process.
        ordinal: u32,
        /// NUMA node, if `has_numa_node` is 1.
        numa_node: u32,
        /// 1 if the NUMA node is known, else 0.
        has_numa_node: u32,
        /// Zero.
        reserved: u32,
        /// The id that names the device in every process, stable over the life of the machine.
        uuid: [u8; 16],
        /// The vendor's name of the device.
        name: Text<256>,
        /// PCI address as `domain:bus:device.function`, or empty.
        pci_address: Text<32>,
        /// The vendor's architecture: `sm_90`, `gfx942`.
        architecture: Text<64>,
    }

    /// The abilities of a device, and the facts about its behavior.
    RawCapabilities "hw_capabilities" sized 64 {
        /// Bytes of this struct.
        size: u64,
        /// Abilities: HW_CAN_... . A program ignores unknown bits.
        abilities: u64,
        /// Facts: HW_FACT_... .
        facts: u64,
        /// Transports that share its memory: 1 shifted left by HW_TRANSPORT_..., for each.
        ipc_transports: u32,
        /// Zero.
        reserved: u32,
        /// Bytes of one registration, when the program makes large blocks of page-locked memory itself; 0: never.
        register_piece_bytes: u64,
        /// Alignment in bytes of a BLAS workspace; a power of two.
        workspace_alignment: u64,
        /// Bytes of workspace at which a BLAS handle is fastest.
        blas_workspace_bytes: u64,
        /// Bytes of workspace that an Lt plan may use by default.
        lt_workspace_bytes: u64,
        /// Bytes of which sizes and addresses of mapped memory are multiples, with HW_CAN_MAPPED_MEMORY; else 0.
        mapped_memory_granularity: u64,
    }

    /// Free and total memory of a device, in bytes.
    RawMemoryInfo "hw_memory_info" sized 24 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes that can be allocated now.
        free: u64,
        /// Bytes of the device's memory.
        total: u64,
    }

    /// A range of device memory that any code of the process allocated.
    RawMemoryRange "hw_memory_range" sized 32 {
        /// Bytes of this struct.
        size: u64,
        /// First byte.
        base: u64,
        /// Number of bytes: of the whole block, or of one mapping.
        bytes: u64,
        /// HW_RANGE_... .
        kind: u32,
        /// Transports by which `export_memory` may export the start of the range: 1 shifted left by HW_TRANSPORT_..., for each.
        transports: u32,
    }

    /// Counts of the objects of a backend that are alive. All are zero once everything was destroyed.
    RawLiveObjects "hw_live_objects" sized 80 {
        /// Bytes of this struct.
        size: u64,
        /// Streams that `create_stream` made.
        streams: u64,
        /// Events that `create_event` made or `open_event` opened.
        events: u64,
        /// BLAS and Lt handles.
        handles: u64,
        /// Blocks of device memory.
        allocations: u64,
        /// Blocks of page-locked host memory, allocated or registered.
        host_allocations: u64,
        /// Graphs and executable graphs.
        graphs: u64,
        /// Mappings of other processes' memory.
        mappings: u64,
        /// File descriptors that sharing made.
        descriptors: u64,
        /// Shared files that sharing made.
        shared_files: u64,
        /// Ranges of addresses that `reserve_addresses` returned.
        reservations: u64,
        /// Physical memory that `create_memory` made, until `destroy_memory`.
        physical_memory: u64,
    }

    /// Options of a stream.
    RawStreamOptions "hw_stream_options" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// HW_STREAM_PRIORITY_... .
        priority: u32,
        /// Zero.
        reserved: u32,
    }

    /// Options of an event.
    RawEventOptions "hw_event_options" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// 1 to allow `event_elapsed_ns`, else 0.
        timing: u32,
        /// 1 to let another process open the event, else 0.
        interprocess: u32,
    }

    /// Options of an allocation of device memory.
    RawAllocateOptions "hw_allocate_options" sized 40 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes to allocate. With 0, the call returns HW_ERROR_INVALID_ARGUMENT.
        bytes: u64,
        /// HW_DEVICE_MEMORY_... .
        kind: u32,
        /// HW_TRANSPORT_..., for HW_DEVICE_MEMORY_SHAREABLE; else 0.
        transport: u32,
        /// The stream, for HW_DEVICE_MEMORY_STREAM_ORDERED; else zeros.
        stream: RawId,
    }

    /// Options of page-locked memory.
    RawHostOptions "hw_host_options" sized 16 {
        /// Bytes of this struct.
        size: u64,
        /// HW_HOST_MEMORY_... .
        kind: u32,
        /// Zero.
        reserved: u32,
        /// 1 if `host_register` gets memory that the CPU may only read; else 0. `host_allocate` ignores it.
        read_only: u32,
        /// Zero.
        reserved_2: u32,
    }

    /// One side of a copy.
    RawLocation "hw_location" {
        /// HW_LOCATION_... .
        kind: u32,
        /// Ordinal of the device, for HW_LOCATION_DEVICE; else 0.
        device: u32,
        /// Address in that memory.
        address: u64,
    }

    /// A copy of bytes. Its two sides do not overlap.
    RawMemoryCopy "hw_memory_copy" sized 48 {
        /// Bytes of this struct.
        size: u64,
        /// Destination.
        dst: RawLocation,
        /// Source.
        src: RawLocation,
        /// Bytes to copy. With 0, the call succeeds and copies nothing.
        bytes: u64,
    }

    /// A copy of rows. No row of one side overlaps a row of the other.
    RawMemoryCopy2d "hw_memory_copy_2d" sized 72 {
        /// Bytes of this struct.
        size: u64,
        /// The first row of the destination.
        dst: RawLocation,
        /// The first row of the source.
        src: RawLocation,
        /// Bytes of each row. With 0, the call succeeds and copies nothing.
        width: u64,
        /// Number of rows. With 0, the call succeeds and copies nothing.
        height: u64,
        /// Bytes from the beginning of one row to that of the next in the source.
        src_pitch: u64,
        /// The same in the destination.
        dst_pitch: u64,
    }

    /// A fill of device memory with one element.
    RawMemoryFill "hw_memory_fill" sized 40 {
        /// Bytes of this struct.
        size: u64,
        /// First byte; a multiple of the element's size.
        dst: u64,
        /// Number of elements. With 0, the call succeeds and writes nothing.
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
        /// 1 if op(A) is A transposed, else 0.
        transpose_a: u32,
        /// 1 if op(B) is B transposed, else 0.
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
        /// 1 for a batch of products at equal strides, else 0.
        has_batch: u32,
        /// Zero.
        reserved: u32,
        /// Number of products, if `has_batch` is 1.
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
        /// Factor of the old C. With 0, the old C is not read.
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
        /// 1 for this memory, 0 for the handle's own.
        present: u32,
        /// Zero.
        reserved: u32,
    }

    /// Options of an Lt plan.
    RawPlanOptions "hw_plan_options" sized 144 {
        /// Bytes of this struct.
        size: u64,
        /// Sizes, leading dimensions, batch.
        shape: RawGemmShape,
        /// Bytes of workspace that the plan may use.
        workspace_bytes: u64,
        /// Alignment in bytes of every operand's address.
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
        /// Factor of C. With 0, C is not read.
        beta: f64,
        /// First element of A.
        a: u64,
        /// First element of B.
        b: u64,
        /// First element of C.
        c: u64,
        /// First element of D, which has the layout of C.
        d: u64,
        /// First element of the bias, if `has_bias` is 1.
        bias: u64,
        /// 1 if there is a bias, else 0.
        has_bias: u32,
        /// Zero.
        reserved: u32,
    }

    /// Options of physical memory.
    RawPhysicalMemoryOptions "hw_physical_memory_options" sized 32 {
        /// Bytes of this struct.
        size: u64,
        /// Bytes of memory; a multiple of hw_capabilities.mapped_memory_granularity, and not 0.
        bytes: u64,
        /// 1 if other processes can open the memory, else 0.
        shareable: u32,
        /// HW_TRANSPORT_..., if `shareable` is 1; else 0.
        transport: u32,
        /// 1 if other devices of the machine, such as network adapters, may access the memory directly, else 0.
        rdma: u32,
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
        /// A file descriptor that is sent with the payload, or -1. In an answer, the program owns it and closes it. In an
        /// argument, the program keeps it, and the plugin must not close it.
        descriptor: i32,
        /// UUID of the device that owns the memory.
        device_uuid: [u8; 16],
        /// The vendor's handle.
        payload: [u8; 64],
        /// In an answer with a descriptor: the argument of `release_descriptor`, which the program calls once it has closed
        /// the descriptor; 0 for no call.
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
    /// An error without details.
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
