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

/// The kind of a symbol that a library defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    Function,
    /// Data, or a number without an address.
    Other,
}

/// The most bytes of a table of symbols or of their names that are read.
const MOST_BYTES: u64 = 64 << 20;
/// Bytes of an entry of the section headers, and of a symbol.
const SECTION_HEADER: usize = 64;
const SYMBOL: usize = 24;

/// Returns the kind of the symbol `name` that a library exports. `None` if the file defines none, or has no section headers to tell:
/// then the loader decides.
pub(super) fn symbol(file: &File, bytes: u64, name: &str) -> io::Result<Option<Symbol>> {
    let read = |offset: u64, length: u64| {
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= bytes) && length <= MOST_BYTES;
        let mut part = vec![0; if is_inside { length as usize } else { 0 }];
        file.read_exact_at(&mut part, offset)?;
        io::Result::Ok(part)
    };
    let header = read(0, HEADER as u64)?;
    if header.len() < HEADER || usize::from(u16_at(&header, 58)) != SECTION_HEADER {
        return Ok(None);
    }
    let sections = read(u64_at(&header, 40), u64::from(u16_at(&header, 60)) * SECTION_HEADER as u64)?;
    let section = |index: usize| sections.chunks_exact(SECTION_HEADER).nth(index);
    let contents = |section: &[u8]| read(u64_at(section, 24), u64_at(section, 32));
    let mut found = None;
    // `SHT_DYNSYM`.
    for table in sections.chunks_exact(SECTION_HEADER).filter(|section| u32_at(section, 4) == 11) {
        let Some(names) = section(u32_at(table, 40) as usize) else { continue };
        let names = contents(names)?;
        for symbol in contents(table)?.chunks_exact(SYMBOL) {
            let named = names.get(u32_at(symbol, 0) as usize..).and_then(|rest| rest.strip_prefix(name.as_bytes()));
            let (binding, kind, place) = (symbol[4] >> 4, symbol[4] & 15, u16_at(symbol, 6));
            // Local, or undefined (`SHN_UNDEF`).
            if binding == 0 || place == 0 || !named.is_some_and(|rest| rest.starts_with(&[0])) {
                continue;
            }
            // Assemblers leave the type of a function out (`STT_NOTYPE`) unless they are told it. `STT_FUNC`, `STT_GNU_IFUNC`.
            // `SHN_ABS` is a number.
            let is_function = matches!(kind, 0 | 2 | 10) && place != 0xfff1;
            match (is_function, found) {
                (false, _) => found = Some(Symbol::Other),
                (true, None) => found = Some(Symbol::Function),
                (true, Some(_)) => {}
            }
        }
    }
    Ok(found)
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
