//! How each value crosses: which C type it has, how the program lowers it, and how the plugin lifts it, and the other way
//! round for answers. Whatever comes from the other side is read as numbers and checked.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::codes::{
    Abilities, Coded, Facts, LOCATION_DEVICE, LOCATION_HOST, MEMORY_PLAIN, MEMORY_SHAREABLE, MEMORY_STREAM_ORDERED,
    split_kind,
};
use super::link::Link;
use super::raw::*;
use highwater_hal::{
    AllocateOptions, AtomicsMode, BackendTag, BlasKind, BlasOptions, Capabilities, CaptureMode, Completion, DataType,
    Descriptor, DeviceInfo, DeviceMemoryKind, DevicePtr, ErrorKind, EventHandle, EventId, EventOptions, FillPattern,
    Gemm, GemmShape, GraphExecId, GraphId, HostOptions, HostPtr, IdParts, Identity, LiveObjects, Location, MathMode,
    MemoryCopy, MemoryFill, MemoryHandle, MemoryInfo, ObjectId, PlanArguments, PlanId, PlanOptions, StreamId,
    StreamOptions, StridedBatch, Transport, Transports, Transpose, Workspace,
};

/// What is wrong with an argument that came over the table.
#[derive(Debug)]
pub(super) struct Wrong {
    /// As which kind of error it is answered.
    pub(super) kind: ErrorKind,
    /// What it is.
    pub(super) what: String,
}

impl From<String> for Wrong {
    fn from(what: String) -> Self {
        Self { kind: ErrorKind::InvalidArgument, what }
    }
}

/// The two tags of a backend in a plugin: the program's, which stands in every id that crosses, and the one that the
/// plugin's own counter gave, which stands in the ids of the backend inside.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tags {
    /// The program's.
    pub(super) program: BackendTag,
    /// The backend's own.
    pub(super) own: BackendTag,
}

impl Tags {
    /// The tag on the other side. The two are exchanged, so that a foreign id stays foreign.
    #[inline]
    fn across(self, tag: BackendTag) -> BackendTag {
        if tag == self.program {
            self.own
        } else if tag == self.own {
            self.program
        } else {
            tag
        }
    }
}

/// A value that the program hands to the plugin.
pub(super) trait Argument: Sized {
    /// What the program has on its stack during the call.
    type Form;
    /// What crosses.
    type Abi: Copy + CType;
    /// The value in the form that crosses.
    fn form(&self) -> Self::Form;
    /// What crosses for a form.
    fn abi(form: &Self::Form) -> Self::Abi;
    /// The value, in the plugin.
    ///
    /// # Safety
    /// Pointers are null or good for what the header says of them, until the call returns.
    unsafe fn lift(abi: Self::Abi, tags: Tags) -> Result<Self, Wrong>;
}

/// A value that the plugin answers with.
pub(super) trait Answer: Sized {
    /// Where the plugin writes it.
    type Slot;
    /// What the program has there before the call.
    fn empty() -> Self::Slot;
    /// Writes it, in the plugin.
    ///
    /// # Safety
    /// The pointer is null or good for what the header says of it.
    unsafe fn put(self, slot: *mut Self::Slot, tags: Tags) -> Result<(), String>;
    /// Reads it, in the program.
    fn lift(slot: Self::Slot, link: &Arc<Link>) -> Result<Self, String>;
}

/// Writes a plain answer.
///
/// # Safety
/// As [`Answer::put`].
unsafe fn put_plain<T>(slot: *mut T, value: T) -> Result<(), String> {
    if slot.is_null() || !slot.is_aligned() {
        return Err("a pointer for the answer that is null or not aligned".to_owned());
    }
    // SAFETY: the pointer is good for one value (the caller vouches).
    unsafe { slot.write(value) };
    Ok(())
}

fn flag(value: u32, what: &str) -> Result<bool, String> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(format!("{value} for {what}; expected is 0 or 1")),
    }
}

#[inline]
fn choice<C: Coded>(code: u32) -> Result<C, String> {
    C::of(code).ok_or_else(|| format!("{code} for {}, which is none that this side knows", C::WHAT))
}

// ---------------------------------------------------------------------------------------------------------------- numbers

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Argument for $type {
            type Form = Self;
            type Abi = Self;
            #[inline]
            fn form(&self) -> Self {
                *self
            }
            #[inline]
            fn abi(form: &Self) -> Self {
                *form
            }
            #[inline]
            unsafe fn lift(abi: Self, _: Tags) -> Result<Self, Wrong> {
                Ok(abi)
            }
        }

        impl Answer for $type {
            type Slot = Self;
            fn empty() -> Self {
                0
            }
            unsafe fn put(self, slot: *mut Self, _: Tags) -> Result<(), String> {
                // SAFETY: the caller vouches.
                unsafe { put_plain(slot, self) }
            }
            fn lift(slot: Self, _: &Arc<Link>) -> Result<Self, String> {
                Ok(slot)
            }
        }
    )*};
}

numbers!(u32, u64);

impl Argument for usize {
    type Form = u64;
    type Abi = u64;
    #[inline]
    fn form(&self) -> u64 {
        *self as u64
    }
    #[inline]
    fn abi(form: &u64) -> u64 {
        *form
    }
    #[inline]
    unsafe fn lift(abi: u64, _: Tags) -> Result<Self, Wrong> {
        Ok(abi as usize)
    }
}

impl Answer for bool {
    type Slot = u32;
    fn empty() -> u32 {
        u32::MAX
    }
    unsafe fn put(self, slot: *mut u32, _: Tags) -> Result<(), String> {
        // SAFETY: the caller vouches.
        unsafe { put_plain(slot, u32::from(self)) }
    }
    fn lift(slot: u32, _: &Arc<Link>) -> Result<Self, String> {
        flag(slot, "yes or no")
    }
}

macro_rules! choices {
    ($($type:ty),*) => {$(
        impl Argument for $type {
            type Form = u32;
            type Abi = u32;
            #[inline]
            fn form(&self) -> u32 {
                self.code()
            }
            #[inline]
            fn abi(form: &u32) -> u32 {
                *form
            }
            #[inline]
            unsafe fn lift(abi: u32, _: Tags) -> Result<Self, Wrong> {
                Ok(choice(abi)?)
            }
        }
    )*};
}

choices!(AtomicsMode, BlasKind, CaptureMode, MathMode, Transport);

impl Answer for Completion {
    type Slot = u32;
    #[inline]
    fn empty() -> u32 {
        u32::MAX
    }
    #[inline]
    unsafe fn put(self, slot: *mut u32, _: Tags) -> Result<(), String> {
        // SAFETY: the caller vouches.
        unsafe { put_plain(slot, self.code()) }
    }
    #[inline]
    fn lift(slot: u32, _: &Arc<Link>) -> Result<Self, String> {
        choice(slot)
    }
}

// --------------------------------------------------------------------------------------------------------- ids, addresses

/// Where ids of objects end; above are the default streams.
pub(super) const FIRST_NAMED_SLOT: u32 = highwater_hal::FIRST_NAMED_SLOT;

#[inline]
fn raw_id<I: ObjectId>(id: I) -> RawId {
    let IdParts { slot, generation, tag, device } = id.parts();
    RawId { slot, generation: generation.get(), tag: tag.get(), device }
}

const NO_ID: RawId = RawId { slot: 0, generation: 0, tag: 0, device: 0 };

/// An id of the program, in the plugin.
#[inline]
fn lift_id<I: ObjectId>(raw: RawId, tags: Tags) -> Result<I, Wrong> {
    let (Some(generation), Some(tag)) = (NonZeroU32::new(raw.generation), BackendTag::from_number(raw.tag)) else {
        let what = format!("{raw:?} is no {}: generation and tag are never 0", I::NAME);
        return Err(Wrong { kind: ErrorKind::InvalidHandle, what });
    };
    let parts = IdParts { slot: raw.slot, generation, tag: tags.across(tag), device: raw.device };
    // SAFETY: the id was issued by the backend in this plugin, to which alone it is given, or the program has forged it, and
    // then vouches for it as for its own.
    Ok(unsafe { I::from_parts(parts) })
}

/// An id that the plugin issued, in the program.
#[inline]
fn issued_id<I: ObjectId>(raw: RawId, link: &Link) -> Result<I, String> {
    let (Some(generation), Some(tag)) = (NonZeroU32::new(raw.generation), BackendTag::from_number(raw.tag)) else {
        return Err(format!("{raw:?} for a new {}, with a generation or tag of 0", I::NAME));
    };
    if tag != link.tag() || raw.slot >= FIRST_NAMED_SLOT || raw.device >= link.devices() {
        return Err(format!(
            "{raw:?} for a new {}; expected are tag {}, a slot below {FIRST_NAMED_SLOT} and a device below {}",
            I::NAME,
            link.tag().get(),
            link.devices()
        ));
    }
    // SAFETY: the backend has issued it; whoever loaded the plugin vouches that it keeps its promises.
    Ok(unsafe { I::from_parts(IdParts { slot: raw.slot, generation, tag, device: raw.device }) })
}

macro_rules! ids {
    ($($type:ty),*) => {$(
        impl Argument for $type {
            type Form = RawId;
            type Abi = RawId;
            #[inline]
            fn form(&self) -> RawId {
                raw_id(*self)
            }
            #[inline]
            fn abi(form: &RawId) -> RawId {
                *form
            }
            #[inline]
            unsafe fn lift(abi: RawId, tags: Tags) -> Result<Self, Wrong> {
                lift_id(abi, tags)
            }
        }

        impl Answer for $type {
            type Slot = RawId;
            fn empty() -> RawId {
                NO_ID
            }
            unsafe fn put(self, slot: *mut RawId, tags: Tags) -> Result<(), String> {
                let raw = RawId { tag: tags.across(self.tag()).get(), ..raw_id(self) };
                // SAFETY: the caller vouches.
                unsafe { put_plain(slot, raw) }
            }
            fn lift(slot: RawId, link: &Arc<Link>) -> Result<Self, String> {
                issued_id(slot, link)
            }
        }
    )*};
}

ids!(StreamId, EventId, GraphId, GraphExecId);

impl Argument for Option<StreamId> {
    type Form = RawId;
    type Abi = RawId;
    fn form(&self) -> RawId {
        self.map_or(NO_ID, raw_id)
    }
    fn abi(form: &RawId) -> RawId {
        *form
    }
    unsafe fn lift(abi: RawId, tags: Tags) -> Result<Self, Wrong> {
        // An id is never all zeros, so this is no reserved value of it.
        let RawId { slot, generation, tag, device } = abi;
        if (slot, generation, tag, device) == (0, 0, 0, 0) { Ok(None) } else { lift_id(abi, tags).map(Some) }
    }
}

impl Argument for DevicePtr {
    type Form = u64;
    type Abi = u64;
    fn form(&self) -> u64 {
        self.get()
    }
    fn abi(form: &u64) -> u64 {
        *form
    }
    unsafe fn lift(abi: u64, _: Tags) -> Result<Self, Wrong> {
        Ok(Self::new(abi))
    }
}

impl Answer for DevicePtr {
    type Slot = u64;
    fn empty() -> u64 {
        0
    }
    unsafe fn put(self, slot: *mut u64, _: Tags) -> Result<(), String> {
        // SAFETY: the caller vouches.
        unsafe { put_plain(slot, self.get()) }
    }
    fn lift(slot: u64, _: &Arc<Link>) -> Result<Self, String> {
        if slot == 0 { Err("the address 0 for device memory".to_owned()) } else { Ok(Self::new(slot)) }
    }
}

impl Argument for HostPtr {
    type Form = *mut c_void;
    type Abi = *mut c_void;
    fn form(&self) -> *mut c_void {
        self.as_ptr().cast()
    }
    fn abi(form: &*mut c_void) -> *mut c_void {
        *form
    }
    unsafe fn lift(abi: *mut c_void, _: Tags) -> Result<Self, Wrong> {
        let address = NonNull::new(abi.cast::<u8>()).ok_or_else(|| "a null pointer for host memory".to_owned())?;
        Ok(Self::new(address))
    }
}

impl Answer for HostPtr {
    type Slot = *mut c_void;
    fn empty() -> *mut c_void {
        std::ptr::null_mut()
    }
    unsafe fn put(self, slot: *mut *mut c_void, _: Tags) -> Result<(), String> {
        // SAFETY: the caller vouches.
        unsafe { put_plain(slot, self.as_ptr().cast()) }
    }
    fn lift(slot: *mut c_void, _: &Arc<Link>) -> Result<Self, String> {
        let address = NonNull::new(slot.cast::<u8>()).ok_or("a null pointer for host memory")?;
        if address.addr().get() % 64 != 0 {
            return Err(format!("{address:p} for page-locked memory, which is no multiple of 64"));
        }
        Ok(Self::new(address))
    }
}

impl Argument for PlanId {
    type Form = u64;
    type Abi = u64;
    fn form(&self) -> u64 {
        self.get()
    }
    fn abi(form: &u64) -> u64 {
        *form
    }
    unsafe fn lift(abi: u64, _: Tags) -> Result<Self, Wrong> {
        Ok(Self::new(abi))
    }
}

impl Answer for PlanId {
    type Slot = u64;
    fn empty() -> u64 {
        0
    }
    unsafe fn put(self, slot: *mut u64, _: Tags) -> Result<(), String> {
        // SAFETY: the caller vouches.
        unsafe { put_plain(slot, self.get()) }
    }
    fn lift(slot: u64, _: &Arc<Link>) -> Result<Self, String> {
        Ok(Self::new(slot))
    }
}

/// A handle that the plugin made, behind its pointer.
#[derive(Debug)]
pub(super) struct HandlePtr(pub(super) NonNull<RawHandle>);

impl Answer for HandlePtr {
    type Slot = *mut RawHandle;
    fn empty() -> *mut RawHandle {
        std::ptr::null_mut()
    }
    unsafe fn put(self, slot: *mut *mut RawHandle, _: Tags) -> Result<(), String> {
        // SAFETY: the caller vouches.
        unsafe { put_plain(slot, self.0.as_ptr()) }
    }
    fn lift(slot: *mut RawHandle, _: &Arc<Link>) -> Result<Self, String> {
        Ok(Self(NonNull::new(slot).ok_or("a null pointer for a handle")?))
    }
}

// ------------------------------------------------------------------------------------------------------ structs, inwards

/// Arguments behind a pointer: how the program fills the struct, and how the plugin reads it.
macro_rules! structs_in {
    ($($type:ty as $raw:ty: |$value:ident| $lower:expr, |$read:ident, $tags:ident| $lift:block)*) => {$(
        impl Argument for $type {
            type Form = $raw;
            type Abi = *const $raw;
            #[inline]
            fn form(&self) -> $raw {
                let $value = self;
                $lower
            }
            #[inline]
            fn abi(form: &$raw) -> *const $raw {
                form
            }
            #[inline]
            unsafe fn lift(abi: *const $raw, $tags: Tags) -> Result<Self, Wrong> {
                let mut spare = MaybeUninit::uninit();
                // SAFETY: the caller vouches.
                let $read = unsafe { read_sized(abi, &mut spare) }?;
                let _ = $tags;
                $lift
            }
        }
    )*};
}

/// The size of a struct, as it stands in its first field.
const fn bytes_of<T>() -> u64 {
    size_of::<T>() as u64
}

structs_in! {
    StreamOptions as RawStreamOptions:
        |options| RawStreamOptions { size: bytes_of::<RawStreamOptions>(), priority: options.priority.code(), reserved: 0 },
        |raw, tags| { Ok(Self::new().with_priority(choice(raw.priority)?)) }
    EventOptions as RawEventOptions:
        |options| RawEventOptions {
            size: bytes_of::<RawEventOptions>(),
            timing: u32::from(options.timing),
            interprocess: u32::from(options.interprocess),
        },
        |raw, tags| {
            let (timing, interprocess) = (flag(raw.timing, "`timing`")?, flag(raw.interprocess, "`interprocess`")?);
            let mut options = Self::new();
            (options.timing, options.interprocess) = (timing, interprocess);
            Ok(options)
        }
    AllocateOptions as RawAllocateOptions:
        |options| {
            let (kind, transport, stream) = split_kind(options.kind);
            RawAllocateOptions {
                size: bytes_of::<RawAllocateOptions>(),
                bytes: options.bytes as u64,
                kind,
                transport: transport.map_or(0, Coded::code),
                stream: stream.map_or(NO_ID, raw_id),
            }
        },
        |raw, tags| {
            let kind = match raw.kind {
                MEMORY_PLAIN => DeviceMemoryKind::Plain,
                MEMORY_SHAREABLE => DeviceMemoryKind::Shareable(choice(raw.transport)?),
                MEMORY_STREAM_ORDERED => DeviceMemoryKind::StreamOrdered(lift_id(raw.stream, tags)?),
                other => return Err(format!("{other} for a kind of device memory").into()),
            };
            Ok(Self::new(raw.bytes as usize).with_kind(kind))
        }
    HostOptions as RawHostOptions:
        |options| RawHostOptions { size: bytes_of::<RawHostOptions>(), kind: options.kind.code(), reserved: 0 },
        |raw, tags| { Ok(Self::new().with_kind(choice(raw.kind)?)) }
    MemoryCopy as RawMemoryCopy:
        |copy| RawMemoryCopy {
            size: bytes_of::<RawMemoryCopy>(),
            dst: raw_location(copy.dst),
            src: raw_location(copy.src),
            bytes: copy.bytes as u64,
        },
        |raw, tags| { Ok(Self::new(lift_location(raw.dst)?, lift_location(raw.src)?, raw.bytes as usize)) }
    MemoryFill as RawMemoryFill:
        |fill| RawMemoryFill {
            size: bytes_of::<RawMemoryFill>(),
            dst: fill.dst.get(),
            count: fill.count as u64,
            device: fill.device,
            pattern_bytes: fill.pattern.bytes() as u32,
            pattern: match fill.pattern {
                FillPattern::U8(byte) => u32::from(byte),
                FillPattern::U16(half) => u32::from(half),
                FillPattern::U32(word) => word,
            },
            reserved: 0,
        },
        |raw, tags| {
            let too_large = || format!("the element {:#x} for {} bytes", raw.pattern, raw.pattern_bytes);
            let pattern = match raw.pattern_bytes {
                1 => FillPattern::U8(raw.pattern.try_into().map_err(|_| too_large())?),
                2 => FillPattern::U16(raw.pattern.try_into().map_err(|_| too_large())?),
                4 => FillPattern::U32(raw.pattern),
                other => return Err(format!("an element of {other} bytes; expected are 1, 2 or 4").into()),
            };
            Ok(Self::new(raw.device, DevicePtr::new(raw.dst), pattern, raw.count as usize))
        }
    Gemm as RawGemm:
        |gemm| RawGemm {
            size: bytes_of::<RawGemm>(),
            shape: raw_shape(&gemm.shape),
            alpha: gemm.alpha,
            beta: gemm.beta,
            a: gemm.a.get(),
            b: gemm.b.get(),
            c: gemm.c.get(),
        },
        |raw, tags| {
            let shape = lift_shape(&raw.shape)?;
            let (a, b, c) = (DevicePtr::new(raw.a), DevicePtr::new(raw.b), DevicePtr::new(raw.c));
            Ok(Self::new(shape, a, b, c).with_scale(raw.alpha, raw.beta))
        }
    Option<Workspace> as RawWorkspace:
        |workspace| RawWorkspace {
            size: bytes_of::<RawWorkspace>(),
            address: workspace.map_or(0, |workspace| workspace.ptr.get()),
            bytes: workspace.map_or(0, |workspace| workspace.bytes as u64),
            present: u32::from(workspace.is_some()),
            reserved: 0,
        },
        |raw, tags| {
            let workspace = Workspace { ptr: DevicePtr::new(raw.address), bytes: raw.bytes as usize };
            Ok(flag(raw.present, "`present`")?.then_some(workspace))
        }
    PlanOptions as RawPlanOptions:
        |options| RawPlanOptions {
            size: bytes_of::<RawPlanOptions>(),
            shape: raw_shape(&options.shape),
            workspace_bytes: options.workspace_bytes as u64,
            alignment: options.alignment as u64,
            epilogue: options.epilogue.code(),
            math_mode: options.math_mode.code(),
            atomics_mode: options.atomics_mode.code(),
            reserved: 0,
        },
        |raw, tags| {
            let shape = lift_shape(&raw.shape)?;
            Ok(Self::new(shape, choice(raw.epilogue)?, raw.workspace_bytes as usize)
                .with_alignment(raw.alignment as usize)
                .with_math_mode(choice(raw.math_mode)?)
                .with_atomics_mode(choice(raw.atomics_mode)?))
        }
    PlanArguments as RawPlanArguments:
        |arguments| RawPlanArguments {
            size: bytes_of::<RawPlanArguments>(),
            alpha: arguments.alpha,
            beta: arguments.beta,
            a: arguments.a.get(),
            b: arguments.b.get(),
            c: arguments.c.get(),
            d: arguments.d.get(),
            bias: arguments.bias.map_or(0, DevicePtr::get),
            has_bias: u32::from(arguments.bias.is_some()),
            reserved: 0,
        },
        |raw, tags| {
            let bias = flag(raw.has_bias, "`has_bias`")?.then_some(DevicePtr::new(raw.bias));
            let (a, b, d) = (DevicePtr::new(raw.a), DevicePtr::new(raw.b), DevicePtr::new(raw.d));
            let mut arguments = Self::new(a, b, d, bias);
            (arguments.alpha, arguments.beta, arguments.c) = (raw.alpha, raw.beta, DevicePtr::new(raw.c));
            Ok(arguments)
        }
    MemoryHandle as RawMemoryHandle:
        |handle| RawMemoryHandle {
            size: bytes_of::<RawMemoryHandle>(),
            bytes: handle.bytes,
            transport: handle.transport.code(),
            descriptor: raw_descriptor(handle.descriptor.as_ref()),
            device_uuid: handle.device_uuid,
            payload: handle.payload,
            descriptor_token: 0,
        },
        |raw, tags| {
            let mut handle = Self::new(choice(raw.transport)?, raw.device_uuid, raw.bytes, raw.payload);
            handle.descriptor = lift_descriptor(raw.descriptor)?;
            Ok(handle)
        }
    EventHandle as RawEventHandle:
        |handle| RawEventHandle {
            size: bytes_of::<RawEventHandle>(),
            descriptor: raw_descriptor(handle.descriptor.as_ref()),
            reserved: 0,
            device_uuid: handle.device_uuid,
            payload: handle.payload,
            descriptor_token: 0,
        },
        |raw, tags| {
            let mut handle = Self::new(raw.device_uuid, raw.payload);
            handle.descriptor = lift_descriptor(raw.descriptor)?;
            Ok(handle)
        }
}

impl Argument for BlasOptions {
    type Form = u32;
    type Abi = u32;
    fn form(&self) -> u32 {
        self.kind.code()
    }
    fn abi(form: &u32) -> u32 {
        *form
    }
    unsafe fn lift(abi: u32, _: Tags) -> Result<Self, Wrong> {
        Ok(Self::new(choice(abi)?))
    }
}

fn raw_location(location: Location) -> RawLocation {
    match location {
        Location::Host(ptr) => {
            RawLocation { kind: LOCATION_HOST, device: 0, address: ptr.as_ptr().expose_provenance() as u64 }
        }
        Location::Device { device, ptr } => RawLocation { kind: LOCATION_DEVICE, device, address: ptr.get() },
    }
}

fn lift_location(raw: RawLocation) -> Result<Location, String> {
    match raw.kind {
        LOCATION_HOST => {
            let address = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(raw.address as usize));
            Ok(Location::Host(HostPtr::new(address.ok_or("a null pointer for host memory")?)))
        }
        LOCATION_DEVICE => Ok(Location::Device { device: raw.device, ptr: DevicePtr::new(raw.address) }),
        other => Err(format!("{other} for the side of a copy")),
    }
}

#[inline]
fn raw_shape(shape: &GemmShape) -> RawGemmShape {
    let batch = shape.batch.unwrap_or(StridedBatch { count: 0, stride_a: 0, stride_b: 0, stride_c: 0 });
    RawGemmShape {
        data_type: shape.data_type.code(),
        output: shape.output.code(),
        transpose_a: u32::from(shape.transpose_a == Transpose::Yes),
        transpose_b: u32::from(shape.transpose_b == Transpose::Yes),
        m: shape.m as u64,
        n: shape.n as u64,
        k: shape.k as u64,
        lda: shape.lda as u64,
        ldb: shape.ldb as u64,
        ldc: shape.ldc as u64,
        has_batch: u32::from(shape.batch.is_some()),
        reserved: 0,
        batch_count: batch.count as u64,
        stride_a: batch.stride_a as u64,
        stride_b: batch.stride_b as u64,
        stride_c: batch.stride_c as u64,
    }
}

/// The shape. All inside the caller, and without a `Result` of the whole: moving that about costs more than the rest of a call.
#[inline(always)]
fn lift_shape(raw: &RawGemmShape) -> Result<GemmShape, String> {
    let flags = [raw.transpose_a, raw.transpose_b, raw.has_batch].iter().all(|flag| *flag <= 1);
    let (true, Some(data_type), Some(output)) = (flags, DataType::of(raw.data_type), DataType::of(raw.output)) else {
        return Err(wrong_shape(raw));
    };
    let transposed = |flag| if flag == 0 { Transpose::No } else { Transpose::Yes };
    let batch = StridedBatch {
        count: raw.batch_count as usize,
        stride_a: raw.stride_a as usize,
        stride_b: raw.stride_b as usize,
        stride_c: raw.stride_c as usize,
    };
    let mut shape = GemmShape::new(data_type, raw.m as usize, raw.n as usize, raw.k as usize);
    shape.output = output;
    shape.transpose_a = transposed(raw.transpose_a);
    shape.transpose_b = transposed(raw.transpose_b);
    shape.lda = raw.lda as usize;
    shape.ldb = raw.ldb as usize;
    shape.ldc = raw.ldc as usize;
    shape.batch = (raw.has_batch == 1).then_some(batch);
    Ok(shape)
}

/// What is wrong with a shape that is none.
#[cold]
fn wrong_shape(raw: &RawGemmShape) -> String {
    let types = choice::<DataType>(raw.data_type).and(choice::<DataType>(raw.output)).map(drop);
    let flags = flag(raw.transpose_a, "`transpose_a`").and(flag(raw.transpose_b, "`transpose_b`")).map(drop);
    let batch = flag(raw.has_batch, "`has_batch`").map(drop);
    types.and(flags).and(batch).err().unwrap_or_default()
}

fn raw_descriptor(descriptor: Option<&Descriptor>) -> i32 {
    descriptor.map_or(-1, |descriptor| descriptor.as_ref().as_raw_fd())
}

/// The plugin's own copy of a descriptor that the program keeps.
fn lift_descriptor(raw: i32) -> Result<Option<Descriptor>, Wrong> {
    if raw < 0 {
        return Ok(None);
    }
    // SAFETY: the program keeps the descriptor open until the call returns.
    let theirs = unsafe { BorrowedFd::borrow_raw(raw) };
    match theirs.try_clone_to_owned() {
        Ok(copy) => Ok(Some(Descriptor::new(copy))),
        Err(error) => {
            Err(Wrong { kind: ErrorKind::OperatingSystem, what: format!("descriptor {raw} cannot be copied: {error}") })
        }
    }
}

// ------------------------------------------------------------------------------------------------------ structs, outwards

/// Answers behind a pointer: how the plugin fills the struct, and how the program reads it.
macro_rules! structs_out {
    ($($type:ty as $raw:ident: |$value:ident, $tags:ident| $lower:block, |$read:ident, $link:ident| $lift:block)*) => {$(
        impl Answer for $type {
            type Slot = $raw;
            fn empty() -> $raw {
                // SAFETY: any bytes are a value of a struct that crosses (`Sized64`).
                let mut empty: $raw = unsafe { std::mem::zeroed() };
                empty.size = bytes_of::<$raw>();
                empty
            }
            unsafe fn put(self, slot: *mut $raw, $tags: Tags) -> Result<(), String> {
                let _ = $tags;
                let $value = self;
                let raw: $raw = $lower;
                // SAFETY: the caller vouches.
                unsafe { write_sized(slot, &raw) }
            }
            fn lift($read: $raw, $link: &Arc<Link>) -> Result<Self, String> {
                let _ = $link;
                if $read.size > bytes_of::<$raw>() {
                    return Err(format!("a `{}` of {} bytes, more than there was room for", <$raw as Sized64>::NAME, $read.size));
                }
                $lift
            }
        }
    )*};
}

structs_out! {
    Identity as RawIdentity:
        |identity, tags| {
            let versions: Vec<String> = identity.versions.iter().map(|(what, version)| format!("{what}\t{version}")).collect();
            RawIdentity {
                size: bytes_of::<RawIdentity>(),
                real_device: u32::from(identity.real_device),
                reserved: 0,
                name: Text::new(&identity.name),
                description: Text::new(&identity.description),
                versions: Text::new(&versions.join("\n")),
                blas_workspace_variables: Text::new(&identity.blas_workspace_variables.join("\n")),
                lt_workspace_variables: Text::new(&identity.lt_workspace_variables.join("\n")),
            }
        },
        |raw, link| {
            let mut identity = Self::new(raw.name.read()?, raw.description.read()?, link.tag());
            identity.real_device = flag(raw.real_device, "`real_device`")?;
            let versions = raw.versions.read()?;
            let version = |line: &str| {
                let (what, version) = line.split_once('\t').ok_or_else(|| format!("the version `{line}` without a tab"))?;
                Ok::<_, String>((what.to_owned(), version.to_owned()))
            };
            identity.versions = versions.lines().map(version).collect::<Result<_, _>>()?;
            identity.blas_workspace_variables = names(&raw.blas_workspace_variables.read()?);
            identity.lt_workspace_variables = names(&raw.lt_workspace_variables.read()?);
            Ok(identity)
        }
    MemoryInfo as RawMemoryInfo:
        |info, tags| { RawMemoryInfo { size: bytes_of::<RawMemoryInfo>(), free: info.free, total: info.total } },
        |raw, link| { Ok(Self { free: raw.free, total: raw.total }) }
    LiveObjects as RawLiveObjects:
        |live, tags| {
            RawLiveObjects {
                size: bytes_of::<RawLiveObjects>(),
                streams: live.streams,
                events: live.events,
                handles: live.handles,
                allocations: live.allocations,
                host_allocations: live.host_allocations,
                graphs: live.graphs,
                mappings: live.mappings,
                descriptors: live.descriptors,
                shared_files: live.shared_files,
            }
        },
        |raw, link| {
            let mut live = Self::default();
            live.streams = raw.streams;
            live.events = raw.events;
            live.handles = raw.handles;
            live.allocations = raw.allocations;
            live.host_allocations = raw.host_allocations;
            live.graphs = raw.graphs;
            live.mappings = raw.mappings;
            live.descriptors = raw.descriptors;
            live.shared_files = raw.shared_files;
            Ok(live)
        }
    DeviceInfo as RawDeviceInfo:
        |info, tags| {
            RawDeviceInfo {
                size: bytes_of::<RawDeviceInfo>(),
                memory_bytes: info.memory_bytes,
                ordinal: info.ordinal,
                numa_node: info.numa_node.unwrap_or(0),
                has_numa_node: u32::from(info.numa_node.is_some()),
                reserved: 0,
                uuid: info.uuid,
                name: Text::new(&info.name),
                pci_address: Text::new(info.pci_address.as_deref().unwrap_or("")),
                architecture: Text::new(&info.architecture),
            }
        },
        |raw, link| {
            let mut info = Self::new(raw.ordinal, raw.name.read()?, raw.uuid, raw.memory_bytes);
            info.pci_address = Some(raw.pci_address.read()?).filter(|address| !address.is_empty());
            info.numa_node = flag(raw.has_numa_node, "`has_numa_node`")?.then_some(raw.numa_node);
            info.architecture = raw.architecture.read()?;
            Ok(info)
        }
    Capabilities as RawCapabilities:
        |capabilities, tags| {
            let transports = TRANSPORTS.into_iter().filter(|transport| capabilities.ipc_transports.contains(*transport));
            RawCapabilities {
                size: bytes_of::<RawCapabilities>(),
                abilities: Abilities::of(&capabilities),
                facts: Facts::of(&capabilities),
                ipc_transports: transports.fold(0, |set, transport| set | 1 << transport.code()),
                reserved: 0,
                register_piece_bytes: capabilities.register_piece_bytes as u64,
                workspace_alignment: capabilities.workspace_alignment as u64,
                blas_workspace_bytes: capabilities.blas_workspace_bytes as u64,
                lt_workspace_bytes: capabilities.lt_workspace_bytes as u64,
            }
        },
        |raw, link| {
            if !raw.workspace_alignment.is_power_of_two() {
                return Err(format!("a `workspace_alignment` of {}; expected is a power of two", raw.workspace_alignment));
            }
            let mut capabilities = Self::none();
            Abilities::put(raw.abilities, &mut capabilities);
            Facts::put(raw.facts, &mut capabilities);
            let transports = TRANSPORTS.into_iter().filter(|transport| raw.ipc_transports & 1 << transport.code() != 0);
            capabilities.ipc_transports = transports.fold(Transports::NONE, Transports::with);
            capabilities.register_piece_bytes = raw.register_piece_bytes as usize;
            capabilities.workspace_alignment = raw.workspace_alignment as usize;
            capabilities.blas_workspace_bytes = raw.blas_workspace_bytes as usize;
            capabilities.lt_workspace_bytes = raw.lt_workspace_bytes as usize;
            Ok(capabilities)
        }
    MemoryHandle as RawMemoryHandle:
        |handle, tags| {
            let (descriptor, descriptor_token) = give_descriptor(handle.descriptor)?;
            RawMemoryHandle {
                size: bytes_of::<RawMemoryHandle>(),
                bytes: handle.bytes,
                transport: handle.transport.code(),
                descriptor,
                device_uuid: handle.device_uuid,
                payload: handle.payload,
                descriptor_token,
            }
        },
        |raw, link| {
            let descriptor = take_descriptor(raw.descriptor, raw.descriptor_token, link)?;
            let mut handle = Self::new(choice(raw.transport)?, raw.device_uuid, raw.bytes, raw.payload);
            handle.descriptor = descriptor;
            Ok(handle)
        }
    EventHandle as RawEventHandle:
        |handle, tags| {
            let (descriptor, descriptor_token) = give_descriptor(handle.descriptor)?;
            RawEventHandle {
                size: bytes_of::<RawEventHandle>(),
                descriptor,
                reserved: 0,
                device_uuid: handle.device_uuid,
                payload: handle.payload,
                descriptor_token,
            }
        },
        |raw, link| {
            let descriptor = take_descriptor(raw.descriptor, raw.descriptor_token, link)?;
            let mut handle = Self::new(raw.device_uuid, raw.payload);
            handle.descriptor = descriptor;
            Ok(handle)
        }
}

/// Names, one on a line, that live as long as the process. Each text is kept once, however often a backend is opened.
fn names(lines: &str) -> &'static [&'static str] {
    static KEPT: Mutex<BTreeMap<String, &'static [&'static str]>> = Mutex::new(BTreeMap::new());
    let mut kept = KEPT.lock();
    if let Some(names) = kept.get(lines) {
        return names;
    }
    let text: &'static str = Box::leak(lines.to_owned().into_boxed_str());
    let names: &'static [&'static str] = Box::leak(text.lines().collect());
    kept.insert(lines.to_owned(), names);
    names
}

/// Every transport that this version knows.
const TRANSPORTS: [Transport; 3] = [Transport::Legacy, Transport::Descriptor, Transport::Fabric];

/// A descriptor for the program to keep, and the token by which it says that it has closed it. The plugin's copy lives until
/// then, because the backend counts it.
fn give_descriptor(descriptor: Option<Descriptor>) -> Result<(i32, u64), String> {
    let Some(descriptor) = descriptor else { return Ok((-1, 0)) };
    let copy = descriptor.as_ref().try_clone().map_err(|error| format!("a descriptor cannot be copied: {error}"))?;
    let token = Box::into_raw(Box::new(descriptor)).expose_provenance() as u64;
    Ok((std::os::fd::IntoRawFd::into_raw_fd(copy), token))
}

/// Drops the plugin's copy of a descriptor.
///
/// # Safety
/// The token came from [`give_descriptor`] and is given back once.
pub(super) unsafe fn drop_descriptor(token: u64) {
    let descriptor = std::ptr::with_exposed_provenance_mut::<Descriptor>(token as usize);
    // SAFETY: the token is the address of a box that was given away, once (the caller vouches).
    drop(unsafe { Box::from_raw(descriptor) });
}

/// The program's own descriptor out of an answer.
fn take_descriptor(descriptor: i32, token: u64, link: &Arc<Link>) -> Result<Option<Descriptor>, String> {
    match descriptor {
        -1 => Ok(None),
        0.. => {
            // SAFETY: only asks whether there is such a descriptor.
            if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0 {
                return Err(format!("{descriptor} for a descriptor, which is not open"));
            }
            // SAFETY: it is open, and a descriptor in an answer is the program's from here on.
            let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
            Ok(Some(match link.release_of(token) {
                Some(release) => Descriptor::with_companion(descriptor, release),
                None => Descriptor::new(descriptor),
            }))
        }
        _ => Err(format!("{descriptor} for a descriptor; expected is one, or -1")),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;
    use highwater_hal::Epilogue;

    /// The names of a value's fields, as its `Debug` form shows them.
    fn fields(value: &dyn Debug) -> Vec<String> {
        let names = |line: &str| {
            let (indent, rest) = line.split_at_checked(4)?;
            let (name, _) = rest.split_once(':')?;
            (indent == "    " && !name.contains(' ')).then(|| name.to_owned())
        };
        format!("{value:#?}").lines().filter_map(names).collect()
    }

    /// A new field would not cross, without a word. Each of these numbers stands for a list of assignments above.
    #[test]
    fn every_field_crosses() {
        let ptr = DevicePtr::new(1);
        let shape = GemmShape::new(DataType::F32, 1, 1, 1);
        let at = Location::Device { device: 0, ptr };
        let values: [(&dyn Debug, usize); 17] = [
            (&StreamOptions::new(), 1),
            (&EventOptions::new(), 2),
            (&AllocateOptions::new(1), 2),
            (&HostOptions::new(), 1),
            (&MemoryCopy::new(at, at, 1), 3),
            (&MemoryFill::new(0, ptr, FillPattern::U8(1), 1), 4),
            (&shape, 11),
            (&Gemm::new(shape, ptr, ptr, ptr), 6),
            (&Workspace { ptr, bytes: 1 }, 2),
            (&PlanOptions::new(shape, Epilogue::None, 0), 6),
            (&PlanArguments::new(ptr, ptr, ptr, None), 7),
            (&MemoryHandle::new(Transport::Legacy, [0; 16], 1, [0; 64]), 5),
            (&EventHandle::new([0; 16], [0; 64]), 3),
            (&Identity::new("name", "description", BackendTag::next()), 7),
            (&LiveObjects::default(), 9),
            (&DeviceInfo::new(0, "name", [0; 16], 1), 7),
            (&Capabilities::none(), 33),
        ];
        for (value, number) in values {
            assert_eq!(fields(value).len(), number, "{value:?}: {:?}", fields(value));
        }
    }
}
