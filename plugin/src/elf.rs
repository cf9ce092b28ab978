//! Checks of a library before the loader maps it.
//!
//! The loader's message says little about a file for another machine. A truncated file kills the process, because reading a
//! page behind the end of a file is a bus error.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Bytes of the header of a 64-bit ELF file, and of an entry of its program headers.
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;

/// `EM_X86_64` and `EM_AARCH64`.
const MACHINES: [(&str, u16); 2] = [("x86_64", 62), ("aarch64", 183)];

/// Returns the reason why a file of `bytes` bytes is not a library for this machine, or `None` if it is one.
pub(super) fn wrong(file: &File, bytes: u64) -> io::Result<Option<String>> {
    let mut header = [0; HEADER];
    let whole = bytes >= HEADER as u64;
    let read = if whole { HEADER } else { bytes as usize };
    file.read_exact_at(&mut header[..read], 0)?;
    if let Some(what) = wrong_header(&header[..read]) {
        return Ok(Some(what));
    }
    let (offset, entry, entries) = (u64_at(&header, 32), u16_at(&header, 54), u16_at(&header, 56));
    if usize::from(entry) != PROGRAM_HEADER || entries == 0 {
        return Ok(Some("it is a damaged library (its program headers are not as they have to be)".to_owned()));
    }
    let cut = |end: u64| format!("it is cut off: it has {bytes} bytes, and needs {end}");
    let end = offset.saturating_add(u64::from(entries) * PROGRAM_HEADER as u64);
    if end > bytes {
        return Ok(Some(cut(end)));
    }
    let mut headers = vec![0; usize::from(entries) * PROGRAM_HEADER];
    file.read_exact_at(&mut headers, offset)?;
    // The loader maps the `p_filesz` bytes from `p_offset` on of each `PT_LOAD` (1).
    let loaded = headers.chunks_exact(PROGRAM_HEADER).filter(|header| u32_at(header, 0) == 1);
    let end = loaded.map(|header| u64_at(header, 8).saturating_add(u64_at(header, 32))).max().unwrap_or(0);
    Ok((end > bytes).then(|| cut(end)))
}

/// Returns the fault of the first bytes of a file, or `None` if they are valid.
fn wrong_header(header: &[u8]) -> Option<String> {
    if !header.starts_with(b"\x7fELF") {
        return Some("it is no library (it does not begin as an ELF file)".to_owned());
    }
    if header.len() < HEADER {
        return Some(format!("it is cut off: it has {} bytes, and needs {HEADER}", header.len()));
    }
    if (header[4], header[5]) != (2, 1) {
        return Some("it is a library for a machine of another word size or byte order".to_owned());
    }
    let (kind, machine, ours) = (u16_at(header, 16), u16_at(header, 18), std::env::consts::ARCH);
    if !MACHINES.contains(&(ours, machine)) {
        let theirs = MACHINES.iter().find(|(_, number)| *number == machine).map(|(name, _)| (*name).to_owned());
        let theirs = theirs.unwrap_or_else(|| format!("machine {machine}"));
        return Some(format!("it is a library for {theirs}, and this program is for {ours}"));
    }
    // `ET_DYN`.
    (kind != 3).then(|| format!("it is no shared library (an ELF file of type {kind})"))
}

/// Reads a number of the file, inside `bytes`.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes[at..at + 2].try_into().map_or(0, u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(class: u8, order: u8, kind: u16, machine: u16) -> Vec<u8> {
        let mut header = vec![0x7f, b'E', b'L', b'F', class, order];
        header.resize(16, 0);
        header.extend(kind.to_le_bytes());
        header.extend(machine.to_le_bytes());
        header.resize(HEADER, 0);
        header
    }

    #[test]
    fn files_for_other_machines_are_told_apart() {
        let ours = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
        assert_eq!(wrong_header(&header(2, 1, 3, ours)), None);
        let wrong = |header: &[u8]| wrong_header(header).unwrap();
        assert!(wrong(b"#!/bin/sh\necho no library").contains("no library"));
        assert!(wrong(b"").contains("no library"));
        assert!(wrong(b"\x7fELF").contains("cut off"));
        assert!(wrong(&header(1, 1, 3, 3)).contains("word size"));
        assert!(wrong(&header(2, 2, 3, ours)).contains("byte order"));
        assert!(wrong(&header(2, 1, 3, 62 + 183 - ours)).contains("this program is for"));
        assert!(wrong(&header(2, 1, 3, 8)).contains("machine 8"));
        assert!(wrong(&header(2, 1, 2, ours)).contains("no shared library"));
    }

    #[test]
    fn a_whole_library_passes_and_every_cut_of_it_is_seen() {
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        // Test programs are position independent, which is what a library is.
        assert_eq!(wrong(&file, whole.len() as u64).unwrap(), None);
        for bytes in [0, 3, 10, 63, 64, 100, 4096] {
            let seen = wrong(&file, bytes).unwrap().unwrap();
            assert!(seen.contains("cut off") || bytes < 4, "{bytes}: {seen}");
        }
    }
}
