//! Marshalling: the form of each value in the C table.
//!
//! An [`Argument`] goes from the program to the plugin, and an [`Answer`] comes back. The sender lowers a value to its C type,
//! and the receiver lifts it. The receiver reads everything as numbers, and checks it.
//!
//! - `values`: integers, flags, enums, ids, addresses and handles
//! - `arguments`, `answers`: structs
//! - `descriptors`: file descriptors and their release

mod answers;
mod arguments;
mod descriptors;
mod values;

use std::mem::MaybeUninit;
use std::sync::Arc;

use super::codes::Coded;
use super::link::Link;
use super::raw::CType;
use highwater_hal::{BackendTag, ErrorKind};

pub(super) use self::descriptors::drop_descriptor;
pub(super) use self::values::HandlePtr;

/// An argument that cannot be accepted.
#[derive(Debug)]
pub(super) struct Wrong {
    /// The kind of the error.
    pub(super) kind: ErrorKind,
    /// Its description.
    pub(super) what: String,
}

impl From<String> for Wrong {
    fn from(what: String) -> Self {
        Self { kind: ErrorKind::InvalidArgument, what }
    }
}

/// The two tags of a backend in a plugin: the program's, in every id of the table, and the plugin's, in the ids of its
/// backend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tags {
    /// The program's.
    pub(super) program: BackendTag,
    /// The backend's own.
    pub(super) own: BackendTag,
}

impl Tags {
    /// Returns the tag on the other side. The two are exchanged, so a foreign id stays foreign.
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

/// A value that the program passes to the plugin.
pub(super) trait Argument: Sized {
    /// The lowered value, which the program keeps on its stack during the call.
    type Form;
    /// The C type of the argument: the form, or a pointer to it.
    type Abi: Copy + CType;
    /// Lowers the value, in the program.
    fn form(&self) -> Self::Form;
    /// Returns the C argument of a form.
    fn abi(form: &Self::Form) -> Self::Abi;
    /// Whether the argument is a struct behind a pointer, which a later version may make longer.
    const IS_STRUCT: bool = false;
    /// Returns the C argument of a form, in a struct that is longer by a few bytes with this value. `room` keeps the struct.
    fn longer_abi(form: &Self::Form, byte: u8, room: &mut MaybeUninit<Longer<Self::Form>>) -> Self::Abi {
        let _ = (byte, room);
        Self::abi(form)
    }
    /// Lifts the value, in the plugin.
    ///
    /// # Safety
    /// The caller must pass null, or a pointer as the header describes it, which is valid until the call returns.
    unsafe fn lift(abi: Self::Abi, tags: Tags) -> Result<Self, Wrong>;
}

/// A value that the plugin answers with.
pub(super) trait Answer: Sized {
    /// The C type of the answer.
    type Slot;
    /// Returns the contents of the slot before the call.
    fn empty() -> Self::Slot;
    /// Lowers the value into the slot, in the plugin.
    ///
    /// # Safety
    /// The caller must pass null, or a pointer as the header describes it.
    unsafe fn put(self, slot: *mut Self::Slot, tags: Tags) -> Result<(), String>;
    /// Lifts the value, in the program.
    fn lift(slot: Self::Slot, link: &Arc<Link>) -> Result<Self, String>;
    /// Returns the contents of a slot of the first version's size, if the struct has grown since. A call that answers in it must
    /// change nothing.
    fn first() -> Option<Self::Slot> {
        None
    }
    /// Returns the fault if the plugin wrote more into the slot of [`first`](Self::first) than its size, or states another size.
    fn check_first(slot: &Self::Slot) -> Result<(), String> {
        let _ = slot;
        Ok(())
    }
}

/// A struct of a later version: that of this version, and bytes that the other side does not know.
#[repr(C)]
pub(super) struct Longer<F> {
    known: F,
    unknown: [u8; UNKNOWN_BYTES],
}

/// The bytes by which a [`Longer`] struct is longer.
pub(super) const UNKNOWN_BYTES: usize = 8;

/// Returns whether two values of a type without padding have the same bytes.
pub(super) fn are_alike<T>(one: &T, other: &T) -> bool {
    let (one, other) = (std::ptr::from_ref(one).cast::<u8>(), std::ptr::from_ref(other).cast::<u8>());
    // SAFETY: both are references to a `T`. Slots are numbers, pointers, and structs of those without padding (`raw_structs`
    // asserts it), so each byte is initialized.
    unsafe { std::slice::from_raw_parts(one, size_of::<T>()) == std::slice::from_raw_parts(other, size_of::<T>()) }
}

/// Writes a plain answer.
///
/// # Safety
/// As [`Answer::put`].
unsafe fn put_plain<T>(slot: *mut T, value: T) -> Result<(), String> {
    if slot.is_null() || !slot.is_aligned() {
        return Err("a pointer for the answer that is null or not aligned".to_owned());
    }
    // SAFETY: the caller lets this function write one value.
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

/// Returns the value of a struct's `size` field.
const fn bytes_of<T>() -> u64 {
    size_of::<T>() as u64
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use highwater_hal::{
        AllocateOptions, BackendTag, Capabilities, CopyShape, DataType, DeviceInfo, DevicePtr, Epilogue, EventHandle,
        EventOptions, FillPattern, Gemm, GemmShape, HostOptions, Identity, LiveObjects, Location, MemoryCopy,
        MemoryCopy2d, MemoryFill, MemoryHandle, MemoryRange, PhysicalMemoryOptions, PlanArguments, PlanOptions,
        RangeKind, StreamOptions, Transport, Workspace,
    };

    /// Returns the names of a value's fields, from its `Debug` form.
    fn fields(value: &dyn Debug) -> Vec<String> {
        let names = |line: &str| {
            let (indent, rest) = line.split_at_checked(4)?;
            let (name, _) = rest.split_once(':')?;
            (indent == "    " && !name.contains(' ')).then(|| name.to_owned())
        };
        format!("{value:#?}").lines().filter_map(names).collect()
    }

    /// A new field would silently be lost. Each of these numbers is that of the assignments in `arguments` or `answers`.
    #[test]
    fn every_field_is_marshalled() {
        let ptr = DevicePtr::new(1);
        let shape = GemmShape::new(DataType::F32, 1, 1, 1);
        let at = Location::Device { device: 0, ptr };
        let values: [(&dyn Debug, usize); 21] = [
            (&StreamOptions::new(), 1),
            (&EventOptions::new(), 2),
            (&AllocateOptions::new(1), 2),
            (&PhysicalMemoryOptions::new(1), 3),
            (&HostOptions::new(), 2),
            (&MemoryCopy::new(at, at, 1), 3),
            (&MemoryCopy2d::new(at, at, CopyShape::new(1, 1)), 3),
            (&CopyShape::new(1, 1), 4),
            (&MemoryFill::new(0, ptr, FillPattern::U8(1), 1), 4),
            (&shape, 11),
            (&Gemm::new(shape, ptr, ptr, ptr), 6),
            (&Workspace { ptr, bytes: 1 }, 2),
            (&PlanOptions::new(shape, Epilogue::None, 0), 6),
            (&PlanArguments::new(ptr, ptr, ptr, None), 7),
            (&MemoryHandle::new(Transport::Legacy, [0; 16], 1, [0; 64]), 5),
            (&EventHandle::new([0; 16], [0; 64]), 3),
            (&Identity::new("name", "description", BackendTag::next()), 7),
            (&LiveObjects::default(), 11),
            (&DeviceInfo::new(0, "name", [0; 16], 1), 7),
            (&Capabilities::none(), 39),
            (&MemoryRange::new(RangeKind::Plain, ptr, 1), 4),
        ];
        for (value, number) in values {
            assert_eq!(fields(value).len(), number, "{value:?}: {:?}", fields(value));
        }
    }
}
