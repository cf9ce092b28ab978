//! Ids, addresses and handles.

use std::ffi::c_void;
use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::Arc;

use super::super::link::Link;
use super::super::raw::{RawHandle, RawId};
use super::{Answer, Argument, Tags, Wrong, put_plain};
use highwater_hal::{
    BackendTag, DevicePtr, ErrorKind, EventId, FIRST_NAMED_SLOT, GraphExecId, GraphId, HostPtr, IdParts, ObjectId,
    PlanId, StreamId,
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
                // SAFETY: the caller ensures it.
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
        // No id is all zeros.
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
        // SAFETY: the caller ensures it.
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
        // SAFETY: the caller ensures it.
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
        // SAFETY: the caller ensures it.
        unsafe { put_plain(slot, self.get()) }
    }
    fn lift(slot: u64, _: &Arc<Link>) -> Result<Self, String> {
        Ok(Self::new(slot))
    }
}

/// The pointer of a handle that the plugin made.
#[derive(Debug)]
pub(in super::super) struct HandlePtr(pub(in super::super) NonNull<RawHandle>);

impl Answer for HandlePtr {
    type Slot = *mut RawHandle;
    fn empty() -> *mut RawHandle {
        std::ptr::null_mut()
    }
    unsafe fn put(self, slot: *mut *mut RawHandle, _: Tags) -> Result<(), String> {
        // SAFETY: the caller ensures it.
        unsafe { put_plain(slot, self.0.as_ptr()) }
    }
    fn lift(slot: *mut RawHandle, _: &Arc<Link>) -> Result<Self, String> {
        Ok(Self(NonNull::new(slot).ok_or("a null pointer for a handle")?))
    }
}
