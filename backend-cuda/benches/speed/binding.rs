//! Binding a handle to another stream, its workspace and other modes.

use anyhow::Result;
use highwater_core::{AtomicsMode, BlasKind, BlasOptions, MathMode, Workspace};

use crate::Bench;
use crate::measure::alternate;
use crate::table::{Bar, Row, Table};

pub(crate) fn rows(bench: &Bench<'_>, table: &mut Table) -> Result<()> {
    let Bench { raw, device, options, .. } = bench;
    let bytes = options.workspace_bytes;
    let streams = [device.create_stream()?, device.create_stream()?];
    let memory = [device.allocate::<u8>(bytes)?, device.allocate::<u8>(bytes)?];
    let workspaces = [0, 1].map(|i| Workspace { ptr: memory[i].ptr(), bytes });
    let ids = [streams[0].id(), streams[1].id()];
    let mut handle = bench.runtime.backend().create_blas_handle(0, &BlasOptions::new(BlasKind::Blas))?;
    let can = device.capabilities();
    // On a device without a choice of modes, both sides set the same mode each time.
    let other = can.tf32 && can.atomics_mode;
    let math = [MathMode::Default, if other { MathMode::Tf32 } else { MathMode::Default }];
    let atomics = [AtomicsMode::NotAllowed, if other { AtomicsMode::Allowed } else { AtomicsMode::NotAllowed }];

    let raw_streams = [raw.stream()?, raw.stream()?];
    let raw_memory = [raw.memory(bytes)?, raw.memory(bytes)?];
    let raw_handle = raw.handle()?;
    let bursts = bench.bursts(500);
    let ours = |call: usize| {
        let i = call % 2;
        handle.set_stream(ids[i])?;
        // SAFETY: Nothing is enqueued through this handle, and the memory outlives it.
        unsafe { handle.set_workspace(Some(workspaces[i]))? };
        handle.set_math_mode(math[i])?;
        Ok(handle.set_atomics_mode(atomics[i])?)
    };
    let by_raw = |call: usize| {
        let i = call % 2;
        raw.bind(&raw_handle, &raw_streams[i], &raw_memory[i], bytes)?;
        raw.set_modes(&raw_handle, other && i == 1)
    };
    let pairs = alternate(bursts, |_| Ok(()), ours, by_raw)?;
    table.push(Row::pairs("bind stream, workspace and modes, trait", &pairs).bar(Bar::Times(1.6)));
    handle.destroy()?;

    let ours = |call: usize| {
        drop(streams[call % 2].blas()?);
        Ok(())
    };
    let by_raw = |call: usize| {
        let i = call % 2;
        raw.bind(&raw_handle, &raw_streams[i], &raw_memory[i], bytes)
    };
    let pairs = alternate(bursts, |_| Ok(()), ours, by_raw)?;
    table.push(Row::pairs("lease on alternating streams; raw: SetStream and SetWorkspace", &pairs));
    Ok(())
}
