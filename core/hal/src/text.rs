//! Safe display of foreign text: file names, values of variables, messages of plugins and libraries.

use std::ffi::OsStr;
use std::fmt::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;

/// The number of characters shown of a longer text.
const MOST_CHARACTERS: usize = 200;
/// The number of those from the end, because a path ends in the name of its file.
const AT_THE_END: usize = 60;

/// Displays foreign text without harm to a terminal, and cuts a long one.
///
/// Escapes control characters (C1 included), characters that reorder or hide text, and bytes that are not UTF-8: `\n`,
/// `\u{1b}`, `\xff`. Shows the first 140 and the last 60 of more than 200 characters, with the number of the others
/// between them.
///
/// Displaying an uncut result again changes nothing.
///
/// ```
/// use highwater_hal::display_foreign;
/// assert_eq!(display_foreign("libacme.so").to_string(), "libacme.so");
/// assert_eq!(display_foreign("\u{1b}[2Jgone\n").to_string(), r"\u{1b}[2Jgone\n");
/// let long = display_foreign(&"x".repeat(1000)).to_string();
/// assert!(long.contains("[800 characters left out]"));
/// ```
#[must_use]
pub fn display_foreign(text: &(impl AsRef<OsStr> + ?Sized)) -> impl fmt::Display + fmt::Debug + '_ {
    Foreign(text.as_ref())
}

/// Returns a count with its noun: `0 bytes`, `1 byte`, `2 batches`.
///
/// Nouns whose plural has neither `s` nor `es` are not known.
#[doc(hidden)]
#[must_use]
pub fn counted<N: Copy + PartialEq + From<u8> + fmt::Display>(count: N, noun: &str) -> String {
    let hisses = ["s", "x", "z", "ch", "sh"].iter().any(|end| noun.ends_with(end));
    let plural = match count == N::from(1) {
        true => "",
        false if hisses => "es",
        false => "s",
    };
    format!("{count} {noun}{plural}")
}

#[derive(Debug)]
struct Foreign<'a>(&'a OsStr);

impl fmt::Display for Foreign<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = String::with_capacity(self.0.len());
        for chunk in self.0.as_bytes().utf8_chunks() {
            chunk.valid().chars().try_for_each(|c| push(&mut shown, c))?;
            chunk.invalid().iter().try_for_each(|byte| write!(shown, "\\x{byte:02x}"))?;
        }
        let characters = shown.chars().count();
        if characters <= MOST_CHARACTERS {
            return f.pad(&shown);
        }
        let place = |character: usize| shown.char_indices().nth(character).map_or(shown.len(), |(place, _)| place);
        let (head, tail) = (place(MOST_CHARACTERS - AT_THE_END), place(characters - AT_THE_END));
        let left_out = counted(characters - MOST_CHARACTERS, "character");
        write!(f, "{}... [{left_out} left out] ...{}", &shown[..head], &shown[tail..])
    }
}

/// Escapes the foreign parts of the program's own text. Keeps its line breaks and its length.
///
/// Callers use [`display_foreign`] for the foreign parts. This escapes those that they missed.
#[must_use]
pub fn harmless(text: String) -> String {
    let harms = |c: char| c != '\n' && is_harmful(c);
    if !text.contains(harms) {
        return text;
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        // Writing to a string does not fail.
        let _ = if c == '\n' { shown.write_char(c) } else { push(&mut shown, c) };
    }
    shown
}

fn push(shown: &mut String, c: char) -> fmt::Result {
    match c {
        '\n' | '\r' | '\t' => write!(shown, "{}", c.escape_default()),
        c if is_harmful(c) => write!(shown, "{}", c.escape_unicode()),
        c => shown.write_char(c),
    }
}

/// Returns true if a terminal may obey the character, or a reader may not see it.
fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c,
            // Soft hyphen, the mark of Arabic letters, and marks of direction and of no width.
            '\u{ad}' | '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}'
            // Separators of lines and paragraphs; embedding, overriding and isolating a direction; invisible operators.
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            // The byte order mark, interlinear annotations, tags.
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &(impl AsRef<OsStr> + ?Sized)) -> String {
        display_foreign(text).to_string()
    }

    #[test]
    fn a_count_of_one_has_no_plural() {
        assert_eq!([0_u64, 1, 2].map(|count| counted(count, "byte")), ["0 bytes", "1 byte", "2 bytes"]);
        assert_eq!([1_usize, 2].map(|count| counted(count, "process")), ["1 process", "2 processes"]);
        assert_eq!([1_u32, 2].map(|count| counted(count, "batch")), ["1 batch", "2 batches"]);
        let long = |characters| shown(&"x".repeat(characters));
        assert!(long(201).contains("[1 character left out]") && long(202).contains("[2 characters left out]"));
    }

    #[test]
    fn ordinary_text_of_any_language_is_shown_as_it_is() {
        for text in ["", "libacme.so.1", "a b\\c", "Größe", "設備", "/home/ann/برنامج"] {
            assert_eq!(shown(text), text);
        }
        assert_eq!(format!("{:>6}|", display_foreign("abc")), "   abc|");
    }

    #[test]
    fn characters_that_a_terminal_obeys_or_hides_are_escaped() {
        assert_eq!(shown("\x1b]0;title\x07\x7f"), r"\u{1b}]0;title\u{7}\u{7f}");
        assert_eq!(shown("a\nb\rc\td\0"), r"a\nb\rc\td\u{0}");
        assert_eq!(shown("\u{9b}31m\u{85}"), r"\u{9b}31m\u{85}");
        for c in ('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}').chain(['\u{200e}', '\u{200f}', '\u{61c}']) {
            assert_eq!(shown(&format!("a{c}b")), format!("a{}b", c.escape_unicode()));
        }
        for c in ['\u{2028}', '\u{2029}', '\u{feff}', '\u{200b}', '\u{e0041}'] {
            assert_eq!(shown(&c.to_string()), c.escape_unicode().to_string());
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_escaped() {
        assert_eq!(shown(OsStr::from_bytes(b"a\xffb\xc3")), r"a\xffb\xc3");
        assert_eq!(shown(std::path::Path::new(OsStr::from_bytes(b"/\x9b"))), r"/\x9b");
    }

    #[test]
    fn long_text_is_cut_with_a_mark_that_counts_what_is_left_out() {
        let text = "é".repeat(MOST_CHARACTERS);
        assert_eq!(shown(&text), text);
        let text = format!("/{}/lib.so", "d".repeat(1000));
        let cut = shown(&text);
        assert!(cut.starts_with("/ddd") && cut.ends_with("ddd/lib.so"), "{cut}");
        assert!(cut.contains(&format!("... [{} characters left out] ...", text.len() - MOST_CHARACTERS)), "{cut}");
        // Escapes count with their full length.
        assert!(shown(&"\x1b".repeat(131_072)).chars().count() < 250);
    }

    #[test]
    fn texts_of_our_own_keep_their_lines_and_their_length() {
        let text = "a\nb".repeat(1000);
        assert_eq!(harmless(text.clone()), text);
        assert_eq!(harmless("one\n\x1b[31mtwo".into()), "one\n\\u{1b}[31mtwo");
    }
}
