//! [`processes`]: the processes that share memory, as in the output of `highwater ipc ls --json`.

use std::time::{Duration, SystemTime};

use highwater::Transport;
use highwater::ipc::{Allocation, Answer, SharingProcess};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::{invalid, raised};
use crate::ticket::hexadecimal;

fn transport(transport: Transport) -> &'static str {
    match transport {
        Transport::Legacy => "legacy handle",
        Transport::Descriptor => "descriptor",
        Transport::Fabric => "fabric",
        _ => "unknown",
    }
}

/// Returns the fields that all allocations have. `since` is in seconds since 1970.
fn fields<'py>(py: Python<'py>, allocation: &Allocation) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("kind", if allocation.device.is_some() { "device" } else { "page-locked" })?;
    fields.set_item("device", allocation.device)?;
    fields.set_item("uuid", allocation.device.map(|_| hexadecimal(&allocation.device_uuid)))?;
    fields.set_item("transport", transport(allocation.transport))?;
    fields.set_item("bytes", allocation.bytes)?;
    let since = allocation.since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    fields.set_item("since", since.as_secs())?;
    Ok(fields)
}

fn of_process<'py>(py: Python<'py>, process: &SharingProcess) -> PyResult<Bound<'py, PyDict>> {
    let (shared, opened) = (PyList::empty(py), PyList::empty(py));
    for it in &process.shared {
        let fields = fields(py, &it.allocation)?;
        fields.set_item("dropped", it.is_dropped)?;
        fields.set_item("holders", &it.holders)?;
        shared.append(fields)?;
    }
    for it in &process.opened {
        let fields = fields(py, &it.allocation)?;
        fields.set_item("owner", it.owner)?;
        fields.set_item("owner_has_ended", it.owner_has_ended)?;
        fields.set_item("idle", it.is_idle)?;
        opened.append(fields)?;
    }
    let found = PyDict::new(py);
    found.set_item("pid", process.pid)?;
    found.set_item("answers", process.answer == Answer::Complete)?;
    found.set_item("shared", shared)?;
    found.set_item("opened", opened)?;
    found.set_item("left_off", process.left_off)?;
    Ok(found)
}

/// Returns the processes of this user that share memory, with their lists of it. Waits for at most `timeout` seconds.
///
/// Each process is a dictionary with `pid` (0 in another PID namespace), `answers`, `shared`, `opened` and `left_off`. Raises
/// `OperatingSystem` if the system does not list its sockets.
#[pyfunction]
#[pyo3(signature = (timeout=1.0))]
pub(crate) fn processes(py: Python<'_>, timeout: f64) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let limit = Duration::try_from_secs_f64(timeout)
        .map_err(|_| invalid("processes", format!("{timeout} is no time"), "pass seconds of at least 0"))?;
    let found = py.detach(|| highwater::ipc::processes(limit)).map_err(raised)?;
    found.iter().map(|process| of_process(py, process)).collect()
}
