//! Values that are passed as they are: integers, flags, enums, ids, addresses and handles.

use std::ffi::c_void;
use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::Arc;

use super::super::codes::Coded;
use super::super::link::Link;
use super::super::raw::{RawHandle, RawId};
use super::{Answer, Argument, Tags, Wrong, choice, flag, put_plain};
use highwater_hal::{
    AtomicsMode, BackendTag, BlasOptions, CaptureMode, Completion, DevicePtr, ErrorKind, EventId, FIRST_NAMED_SLOT,
    GraphExecId, GraphId, HostPtr, IdParts, MathMode, ObjectId, PhysicalMemoryId, PlanId, StreamId, Transport,
};

#[inline]
pub(super) fn raw_id<I: ObjectId>(id: I) -> RawId {
    let IdParts { slot, generation, tag, device } = id.parts();
    RawId { slot, generation: generation.get(), tag: tag.get(), device }
}

pub(super) const NO_ID: RawId = RawId { slot: 0, generation: 0, tag: 0, device: 0 };

/// Lifts an id of the program, in the plugin.
#[inline]
pub(super) fn lift_id<I: ObjectId>(raw: RawId, tags: Tags) -> Result<I, Wrong> {
    let (Some(generation), Some(tag)) = (NonZeroU32::new(raw.generation), BackendTag::from_number(raw.tag)) else {
        let what = format!("{raw:?} is no {}: generation and tag are never 0", I::NAME);
        return Err(Wrong { kind: ErrorKind::InvalidHandle, what });
    };
    let parts = IdParts { slot: raw.slot, generation, tag: tags.across(tag), device: raw.device };
    // SAFETY: the backend in this plugin issued the id and alone receives it. Or the program forged the id, and meets the
    // obligations of that.
    Ok(unsafe { I::from_parts(parts) })
}

/// Lowers an id that the backend issued, in the plugin.
fn issued_raw<I: ObjectId>(id: I, tags: Tags) -> RawId {
    let raw = raw_id(id);
    RawId { tag: tags.across(id.parts().tag).get(), ..raw }
}

/// Lifts an id that the plugin issued, in the program.
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
    // SAFETY: the backend issued the id, and the loader of the plugin vouches for its clauses.
    Ok(unsafe { I::from_parts(IdParts { slot: raw.slot, generation, tag, device: raw.device }) })
}

/// Arguments that are passed by value: the program's lowering, and the plugin's lifting.
macro_rules! values_in {
    ($($type:ty as $abi:ty: |$value:ident| $lower:expr, |$read:ident, $tags:pat_param| $lift:expr;)*) => {$(
        impl Argument for $type {
            type Form = $abi;
            type Abi = $abi;
            #[inline]
            fn form(&self) -> $abi {
                let $value = *self;
                $lower
            }
            #[inline]
            fn abi(form: &$abi) -> $abi {
                *form
            }
            #[inline]
            unsafe fn lift($read: $abi, $tags: Tags) -> Result<Self, Wrong> {
                $lift
            }
        }
    )*};
}

values_in! {
    u32 as u32: |number| number, |raw, _| Ok(raw);
    u64 as u64: |number| number, |raw, _| Ok(raw);
    usize as u64: |number| number as u64, |raw, _| Ok(raw as usize);
    AtomicsMode as u32: |mode| mode.code(), |raw, _| Ok(choice(raw)?);
    CaptureMode as u32: |mode| mode.code(), |raw, _| Ok(choice(raw)?);
    MathMode as u32: |mode| mode.code(), |raw, _| Ok(choice(raw)?);
    Transport as u32: |transport| transport.code(), |raw, _| Ok(choice(raw)?);
    BlasOptions as u32: |options| options.kind.code(), |raw, _| Ok(Self::new(choice(raw)?));
    StreamId as RawId: |id| raw_id(id), |raw, tags| lift_id(raw, tags);
    EventId as RawId: |id| raw_id(id), |raw, tags| lift_id(raw, tags);
    GraphId as RawId: |id| raw_id(id), |raw, tags| lift_id(raw, tags);
    GraphExecId as RawId: |id| raw_id(id), |raw, tags| lift_id(raw, tags);
    PhysicalMemoryId as RawId: |id| raw_id(id), |raw, tags| lift_id(raw, tags);
    Option<StreamId> as RawId: |id| id.map_or(NO_ID, raw_id), |raw, tags| {
        // No id is all zeros.
        let RawId { slot, generation, tag, device } = raw;
        if (slot, generation, tag, device) == (0, 0, 0, 0) { Ok(None) } else { lift_id(raw, tags).map(Some) }
    };
    DevicePtr as u64: |ptr| ptr.get(), |raw, _| Ok(Self::new(raw));
    HostPtr as *mut c_void: |ptr| ptr.as_ptr().cast(), |raw, _| {
        let address = NonNull::new(raw.cast::<u8>()).ok_or_else(|| "a null pointer for host memory".to_owned())?;
        Ok(Self::new(address))
    };
    PlanId as u64: |plan| plan.get(), |raw, _| Ok(Self::new(raw));
}

/// The pointer of a handle that the plugin made.
#[derive(Debug)]
pub(in super::super) struct HandlePtr(pub(in super::super) NonNull<RawHandle>);

/// Answers that are one value: the slot before the call, the plugin's lowering, and the program's lifting.
macro_rules! values_out {
    ($(
        $type:ty as $slot:ty = $empty:expr =>
        |$value:ident, $tags:pat_param| $lower:expr, |$read:ident, $link:pat_param| $lift:expr;
    )*) => {$(
        impl Answer for $type {
            type Slot = $slot;
            #[inline]
            fn empty() -> $slot {
                $empty
            }
            #[inline]
            unsafe fn put(self, slot: *mut $slot, $tags: Tags) -> Result<(), String> {
                let $value = self;
                let raw: $slot = $lower;
                // SAFETY: the caller ensures it.
                unsafe { put_plain(slot, raw) }
            }
            #[inline]
            fn lift($read: $slot, $link: &Arc<Link>) -> Result<Self, String> {
                $lift
            }
        }
    )*};
}

values_out! {
    u32 as u32 = 0 => |number, _| number, |raw, _| Ok(raw);
    u64 as u64 = 0 => |number, _| number, |raw, _| Ok(raw);
    bool as u32 = u32::MAX => |flag, _| u32::from(flag), |raw, _| flag(raw, "yes or no");
    Completion as u32 = u32::MAX => |completion, _| completion.code(), |raw, _| choice(raw);
    StreamId as RawId = NO_ID => |id, tags| issued_raw(id, tags), |raw, link| issued_id(raw, link);
    EventId as RawId = NO_ID => |id, tags| issued_raw(id, tags), |raw, link| issued_id(raw, link);
    GraphId as RawId = NO_ID => |id, tags| issued_raw(id, tags), |raw, link| issued_id(raw, link);
    GraphExecId as RawId = NO_ID => |id, tags| issued_raw(id, tags), |raw, link| issued_id(raw, link);
    PhysicalMemoryId as RawId = NO_ID => |id, tags| issued_raw(id, tags), |raw, link| issued_id(raw, link);
    DevicePtr as u64 = 0 => |ptr, _| ptr.get(), |raw, _| {
        if raw == 0 { Err("the address 0 for device memory".to_owned()) } else { Ok(Self::new(raw)) }
    };
    HostPtr as *mut c_void = std::ptr::null_mut() => |ptr, _| ptr.as_ptr().cast(), |raw, _| {
        let address = NonNull::new(raw.cast::<u8>()).ok_or("a null pointer for host memory")?;
        if address.addr().get() % 64 != 0 {
            return Err(format!("{address:p} for page-locked memory, which is no multiple of 64"));
        }
        Ok(Self::new(address))
    };
    PlanId as u64 = 0 => |plan, _| plan.get(), |raw, _| Ok(Self::new(raw));
    HandlePtr as *mut RawHandle = std::ptr::null_mut() => |handle, _| handle.0.as_ptr(), |raw, _| {
        Ok(Self(NonNull::new(raw).ok_or("a null pointer for a handle")?))
    };
}
