//! Ids of streams, events and graphs: small `Copy` values that the backend issues, and checks on entry.
//!
//! An id names a slot, the slot's generation, the backend that issued it, and a device. The backend rejects a stale id (its
//! object was destroyed), a foreign id (another backend issued it) and a forged id before it calls the vendor. Unlike a
//! pointer, an id never names a new object at an old address. Generation and tag are never zero, so `Option<StreamId>` is as
//! small as `StreamId`.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;

use crate::error::{Error, ErrorKind, Result};

/// The number of one open backend in this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BackendTag(NonZeroU32);

impl BackendTag {
    /// Returns a tag that no other backend of this process has.
    #[must_use]
    pub fn next() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // Relaxed: only the uniqueness of the value matters.
        let value = NEXT.fetch_add(1, Ordering::Relaxed);
        // After 2^32 - 1 backends the counter wraps. The tag 1 replaces 0.
        Self(NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN))
    }

    /// Returns the tag with this number, which [`BackendTag::next`] returned in this process or in a plugin.
    pub fn from_number(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Self)
    }

    /// Returns the tag as a number, for logs and for the C table.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Debug for BackendTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BackendTag({})", self.0)
    }
}

/// The parts of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct IdParts {
    /// Index in the table of the backend.
    pub slot: u32,
    /// Number of the object in that slot. It increases at each reuse of the slot.
    pub generation: NonZeroU32,
    /// The backend that issued the id.
    pub tag: BackendTag,
    /// Ordinal of the device that the object belongs to.
    pub device: u32,
}

/// The id of one kind of object. See [`IdTable`].
pub trait ObjectId: Copy + fmt::Debug + fmt::Display {
    /// The kind of object, for messages.
    const NAME: &'static str;
    /// Makes an id from its parts.
    ///
    /// # Safety
    /// Core frees memory according to the answers to its own ids. The caller must pass a forged id only to a backend that no
    /// `Runtime` uses at the time, or forge one that cannot be an id of core's (of another backend, or stale).
    unsafe fn from_parts(parts: IdParts) -> Self;
    /// Returns the parts of the id.
    fn parts(self) -> IdParts;
}

macro_rules! object_id {
    ($(#[$doc:meta])* $name:ident, $words:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(IdParts);

        impl $name {
            /// Returns the ordinal of the object's device.
            #[must_use]
            pub const fn device(self) -> u32 {
                self.0.device
            }

            /// Returns the tag of the backend that issued the id.
            #[must_use]
            pub const fn tag(self) -> BackendTag {
                self.0.tag
            }
        }

        impl ObjectId for $name {
            const NAME: &'static str = $words;
            unsafe fn from_parts(parts: IdParts) -> Self {
                Self(parts)
            }
            fn parts(self) -> IdParts {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let IdParts { slot, generation, tag, device } = self.0;
                write!(f, "{}({slot}.{generation} of backend {}, device {device})", stringify!($name), tag.get())
            }
        }

        /// Writes the kind of object and its numbers.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let IdParts { slot, generation, tag, device } = self.0;
                write!(f, "{} {slot}.{generation} of backend {}, device {device}", $words, tag.get())
            }
        }
    };
}

object_id!(
    /// A stream: a queue of device operations that run in order.
    StreamId,
    "stream"
);
object_id!(
    /// An event: a point in a stream that can be queried and waited for.
    EventId,
    "event"
);
object_id!(
    /// A captured graph, which is not executable yet.
    GraphId,
    "graph"
);
object_id!(
    /// An executable graph.
    GraphExecId,
    "executable graph"
);
object_id!(
    /// Physical memory of a device, which has no address until it is mapped.
    PhysicalMemoryId,
    "physical memory object"
);

/// The first slot that is not a slot of a table but a named constant.
pub const FIRST_NAMED_SLOT: u32 = u32::MAX - 15;
/// The slot of a device's legacy default stream.
pub const LEGACY_SLOT: u32 = u32::MAX - 1;
/// The slot of a per-thread default stream.
pub const PER_THREAD_SLOT: u32 = u32::MAX - 2;

impl StreamId {
    /// Returns the id of the vendor's legacy default stream of `device`.
    #[must_use]
    pub const fn legacy_default(tag: BackendTag, device: u32) -> Self {
        Self(IdParts { slot: LEGACY_SLOT, generation: NonZeroU32::MIN, tag, device })
    }

    /// Returns the id of the vendor's per-thread default stream of `device`, which is another stream in each thread.
    #[must_use]
    pub const fn per_thread_default(tag: BackendTag, device: u32) -> Self {
        Self(IdParts { slot: PER_THREAD_SLOT, generation: NonZeroU32::MIN, tag, device })
    }

    /// Returns true for [`StreamId::legacy_default`].
    #[must_use]
    pub const fn is_legacy_default(self) -> bool {
        self.0.slot == LEGACY_SLOT
    }

    /// Returns true for [`StreamId::per_thread_default`].
    #[must_use]
    pub const fn is_per_thread_default(self) -> bool {
        self.0.slot == PER_THREAD_SLOT
    }
}

/// A backend's table of the objects of one kind. It issues the ids, and checks them on entry.
#[derive(Debug)]
pub struct IdTable<I, T> {
    tag: BackendTag,
    slots: RwLock<Slots<T>>,
    kind: std::marker::PhantomData<fn(I) -> I>,
}

#[derive(Debug)]
struct Slots<T> {
    entries: Vec<Slot<T>>,
    free: Vec<u32>,
    live: usize,
}

#[derive(Debug)]
struct Slot<T> {
    generation: NonZeroU32,
    device: u32,
    object: Option<Arc<T>>,
}

impl<I: ObjectId, T> IdTable<I, T> {
    /// Returns an empty table of the backend `tag`.
    #[must_use]
    pub fn new(tag: BackendTag) -> Self {
        let slots = Slots { entries: Vec::new(), free: Vec::new(), live: 0 };
        Self { tag, slots: RwLock::new(slots), kind: std::marker::PhantomData }
    }

    /// Inserts an object of `device` and returns its id.
    ///
    /// # Errors
    /// `OutOfMemory` if all slots (over four billion) are in use.
    pub fn insert(&self, operation: &'static str, device: u32, object: Arc<T>) -> Result<I> {
        let mut slots = self.slots.write();
        let slot = match slots.free.pop() {
            Some(slot) => slot,
            None => match u32::try_from(slots.entries.len()) {
                Ok(slot) if slot < FIRST_NAMED_SLOT => {
                    slots.entries.push(Slot { generation: NonZeroU32::MIN, device, object: None });
                    slot
                }
                _ => return Err(Error::new(ErrorKind::OutOfMemory, operation, format!("too many {}s", I::NAME))),
            },
        };
        slots.live += 1;
        let tag = self.tag;
        let entry = &mut slots.entries[slot as usize];
        entry.device = device;
        entry.object = Some(object);
        // SAFETY: the id is not forged, because the backend's own table now holds its object.
        Ok(unsafe { I::from_parts(IdParts { slot, generation: entry.generation, tag, device }) })
    }

    /// Returns the object of `id`.
    ///
    /// # Errors
    /// `InvalidHandle` for a stale, foreign or forged id.
    pub fn get(&self, operation: &'static str, id: I) -> Result<Arc<T>> {
        let slots = self.slots.read();
        slots.find(self.tag, operation, id).cloned()
    }

    /// Checks `id` without touching its object.
    ///
    /// # Errors
    /// As [`IdTable::get`].
    pub fn check(&self, operation: &'static str, id: I) -> Result<()> {
        self.slots.read().find(self.tag, operation, id).map(|_| ())
    }

    /// Removes the object of `id`, which is stale afterwards.
    ///
    /// # Errors
    /// As [`IdTable::get`].
    pub fn remove(&self, operation: &'static str, id: I) -> Result<Arc<T>> {
        let mut slots = self.slots.write();
        slots.find(self.tag, operation, id)?;
        let slot = id.parts().slot;
        let entry = &mut slots.entries[slot as usize];
        let object = entry.object.take();
        // A slot that has used all its generations is never issued again.
        if let Some(next) = entry.generation.checked_add(1) {
            entry.generation = next;
            slots.free.push(slot);
        }
        slots.live -= 1;
        object.ok_or_else(|| stale::<I>(operation, id))
    }

    /// Returns the number of objects in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.read().live
    }

    /// Returns true if the table is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns every object in the table, in the order of the slots.
    #[must_use]
    pub fn objects(&self) -> Vec<Arc<T>> {
        self.slots.read().entries.iter().filter_map(|slot| slot.object.clone()).collect()
    }
}

impl<T> Slots<T> {
    fn find<I: ObjectId>(&self, tag: BackendTag, operation: &'static str, id: I) -> Result<&Arc<T>> {
        let parts = id.parts();
        if parts.tag != tag {
            return Err(Error::new(
                ErrorKind::InvalidHandle,
                operation,
                format!("the {id} belongs to another opened backend than {}, which was called", tag.get()),
            )
            .with_hint(format!("create the {} with the runtime or the backend that uses it", I::NAME)));
        }
        match self.entries.get(parts.slot as usize) {
            Some(Slot { generation, device, object: Some(object) })
                if *generation == parts.generation && *device == parts.device =>
            {
                Ok(object)
            }
            _ => Err(stale(operation, id)),
        }
    }
}

#[cold]
fn stale<I: ObjectId>(operation: &'static str, id: I) -> Error {
    Error::new(ErrorKind::InvalidHandle, operation, format!("the {id} does not exist (any more)"))
        .with_hint(format!("the {} was destroyed; create a new one", I::NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_stale_after_its_object_was_removed_even_when_the_slot_is_used_again() {
        let table = IdTable::<StreamId, u8>::new(BackendTag::next());
        let old = table.insert("t", 0, Arc::new(1)).unwrap();
        assert_eq!(*table.remove("t", old).unwrap(), 1);
        let new = table.insert("t", 0, Arc::new(2)).unwrap();
        assert_eq!(old.parts().slot, new.parts().slot);
        assert_eq!(table.get("t", old).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert_eq!(table.remove("t", old).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert_eq!(*table.get("t", new).unwrap(), 2);
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn an_id_of_another_backend_or_device_is_refused() {
        let table = IdTable::<EventId, u8>::new(BackendTag::next());
        let other = IdTable::<EventId, u8>::new(BackendTag::next());
        let id = table.insert("t", 1, Arc::new(1)).unwrap();
        let error = other.get("query", id).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidHandle, "query"));
        assert_eq!(error.hint(), "create the event with the runtime or the backend that uses it");
        // SAFETY: no runtime uses this table.
        let forged = unsafe { EventId::from_parts(IdParts { device: 0, ..id.parts() }) };
        assert_eq!(table.get("t", forged).unwrap_err().kind(), ErrorKind::InvalidHandle);
        assert!(table.check("t", id).is_ok());
    }

    #[test]
    fn no_id_needs_no_extra_space() {
        assert_eq!(size_of::<Option<StreamId>>(), size_of::<StreamId>());
    }

    #[test]
    fn named_streams_are_in_no_table() {
        let tag = BackendTag::next();
        let table = IdTable::<StreamId, u8>::new(tag);
        let legacy = StreamId::legacy_default(tag, 0);
        assert!(legacy.is_legacy_default() && !legacy.is_per_thread_default());
        assert!(table.get("t", legacy).is_err());
        assert!(table.is_empty());
    }
}
