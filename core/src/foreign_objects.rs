//! Events of other code, and the devices that foreign memory and foreign streams belong to.

use crate::device::Device;
use crate::event::Event;
use highwater_hal::{DevicePtr, Error, ErrorKind, EventId, Result};

impl Device {
    /// Wraps an event that other code made and keeps: a `cudaEvent_t` on CUDA, a `hipEvent_t` on ROCm. The event refers to the
    /// latest record at the time of each wait and query. The drop of the event leaves the other code's as it is.
    ///
    /// ```
    /// # use highwater_core::{Backend, EventOptions, Runtime};
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let gpu = MockGpu::open(MockOptions::new())?;
    /// # let runtime = Runtime::new(gpu.clone())?;
    /// # let event = gpu.create_event(0, &EventOptions::new())?;
    /// # let raw = gpu.raw_event(event)?;
    /// let device = runtime.device(0)?;
    /// let stream = device.create_stream()?;
    /// // SAFETY: the other code's event stays alive until both lines are done.
    /// let event = unsafe { device.event_from_raw(raw)? };
    /// stream.wait(&event)?;
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Unsupported` if `foreign_objects` is false; `InvalidArgument` for 0; else the backend's error. `WrongDevice` for an event
    /// of another device, if the driver can tell. The message then has the ordinal and the UUID of both.
    ///
    /// # Safety
    /// The caller must pass a live event of this device. The caller must keep it alive until the returned event is dropped and all
    /// futures of it have ended.
    pub unsafe fn event_from_raw(&self, raw: u64) -> Result<Event> {
        const OPERATION: &str = "event_from_raw";
        self.runtime().inner.check(OPERATION)?;
        // SAFETY: The caller keeps the event. The drop of the returned event destroys the id.
        let id = unsafe { self.wrap_event(OPERATION, raw)? };
        Ok(Event::unpooled(self.runtime().clone(), self.ordinal(), id))
    }

    /// Returns an id for an event of other code.
    ///
    /// # Safety
    /// As for [`Backend::event_from_raw`](highwater_hal::Backend::event_from_raw).
    pub(crate) unsafe fn wrap_event(&self, operation: &'static str, raw: u64) -> Result<EventId> {
        if !self.capabilities().foreign_objects {
            return Err(Error::lacks(operation, "foreign_objects"));
        }
        if raw == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, operation, "the handle is 0, expected an event")
                .with_hint("pass the handle of an event that exists"));
        }
        let backend = &self.runtime().inner.backend;
        // SAFETY: As the caller promises.
        let wrapped = unsafe { backend.event_from_raw(self.ordinal(), raw) };
        wrapped.map_err(|error| {
            let is_of = |device| {
                // SAFETY: The event is alive, and the id is destroyed at once.
                let found = unsafe { backend.event_from_raw(device, raw) };
                // A refusal of the destroy leaves an id behind, and nothing else.
                found
                    .map(|id| {
                        let _ = backend.destroy_event(id);
                    })
                    .is_ok()
            };
            self.with_places(operation, &format!("the event {raw:#x}"), error, is_of)
        })
    }

    /// Returns the error of a description of memory, with both devices if the memory is another one's.
    #[cold]
    pub(crate) fn place_of_memory(&self, operation: &'static str, ptr: DevicePtr, error: Error) -> Error {
        let backend = &self.runtime().inner.backend;
        self.with_places(operation, &format!("the memory at {ptr}"), error, |device| {
            backend.describe_memory(device, ptr).is_ok()
        })
    }

    /// Returns the error of a wrapped stream, with both devices if the stream is another one's.
    #[cold]
    pub(crate) fn place_of_stream(&self, operation: &'static str, raw: u64, error: Error) -> Error {
        let backend = &self.runtime().inner.backend;
        self.with_places(operation, &format!("the stream {raw:#x}"), error, |device| {
            // SAFETY: The stream is alive. The id is destroyed at once.
            unsafe { backend.stream_from_raw(device, raw) }.is_ok_and(|id| {
                // A refusal leaves an id behind, and nothing else.
                let _ = backend.destroy_stream(id);
                true
            })
        })
    }

    /// Returns the error of an object with the name of the operation. If the object belongs to another device, the message names
    /// both devices.
    fn with_places(&self, operation: &'static str, object: &str, error: Error, is_of: impl Fn(u32) -> bool) -> Error {
        let devices = &self.runtime().inner.devices;
        let others = (0..devices.len() as u32).filter(|&device| device != self.ordinal());
        let found =
            if error.kind() == ErrorKind::WrongDevice { others.into_iter().find(|&other| is_of(other)) } else { None };
        let named = match found {
            Some(other) => {
                let message =
                    format!("{object} belongs to {}, not to {}", self.place(other), self.place(self.ordinal()));
                Error::new(ErrorKind::WrongDevice, operation, message)
                    .with_hint(format!("call this on device {other} of the runtime"))
            }
            None => Error::new(error.kind(), operation, error.message()).with_hint(error.hint()),
        };
        error.code().into_iter().fold(named, Error::with_code)
    }

    /// `device 1 (UUID 6d6f636b...)`.
    fn place(&self, ordinal: u32) -> String {
        let uuid = self.runtime().inner.device(ordinal).info.uuid;
        let uuid: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("device {ordinal} (UUID {uuid})")
    }
}
