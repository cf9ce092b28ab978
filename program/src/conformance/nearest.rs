//! Names that are near to a misspelled one, for hints.

/// Returns the names that differ from the text in the fewest letters, at most three. Returns none if no name is near.
pub(super) fn nearest<'n>(text: &str, names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    const MOST_NAMES: usize = 3;
    let text = text.to_lowercase();
    // Two errors turn a text of three letters into almost any other.
    let most = text.chars().count() / 4;
    let mut near: Vec<(usize, &str)> =
        names.map(|name| (strsim::osa_distance(&text, name), name)).filter(|(errors, _)| *errors <= most).collect();
    near.sort_unstable();
    near.dedup();
    let least = near.first().map_or(0, |(errors, _)| *errors);
    near.into_iter().take_while(|(errors, _)| *errors == least).take(MOST_NAMES).map(|(_, name)| name).collect()
}

/// Returns a hint that begins with the nearest names and goes on with `otherwise`.
pub(super) fn hint<'n>(text: &str, names: impl Iterator<Item = &'n str>, otherwise: String) -> String {
    let names: Vec<String> = nearest(text, names).into_iter().map(|name| format!("`{name}`")).collect();
    if names.is_empty() { otherwise } else { format!("did you mean {}? Else {otherwise}", names.join(" or ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_name_is_near_to_its_own_and_nothing_is_near_to_another_word() {
        let names = ["stream.order", "stream.query", "copy.ordered", "event.query"];
        assert_eq!(nearest("stream.ordr", names.into_iter()), ["stream.order"]);
        assert_eq!(nearest("Stream.Querry", names.into_iter()), ["stream.query"]);
        assert!(nearest("zebra", names.into_iter()).is_empty());
        assert!(nearest("", names.into_iter()).is_empty());
        let hint = hint("stream.ordr", names.into_iter(), "name a case".to_owned());
        assert_eq!(hint, "did you mean `stream.order`? Else name a case");
    }
}
