//! Finds marks in a text that may be incomplete.

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A mark, by its index, starts at `at`.
    Mark { at: usize, number: usize },
    /// No mark starts before `until`. A mark may start there, depending on the next text.
    None { until: usize },
}

/// Finds the first of `marks` in `text`, and the longest if several start at one place. `is_end`
/// means that the text is complete.
pub(super) fn find<'a>(
    text: &str,
    marks: impl Iterator<Item = &'a str> + Clone,
    is_end: bool,
) -> Found {
    // Marks start with few different bytes.
    let mut starts = [false; 256];
    let mut longest = 0;
    for mark in marks.clone() {
        if let Some(&first) = mark.as_bytes().first() {
            starts[usize::from(first)] = true;
            longest = longest.max(mark.len());
        }
    }
    for (at, byte) in text.bytes().enumerate() {
        if !starts[usize::from(byte)] {
            continue;
        }
        let rest = &text.as_bytes()[at..];
        let mut best: Option<(usize, usize)> = None;
        let mut may_be_longer = false;
        for (number, mark) in marks.clone().enumerate() {
            let mark = mark.as_bytes();
            if mark.is_empty() {
                continue;
            }
            if rest.starts_with(mark) {
                if best.is_none_or(|(length, _)| length < mark.len()) {
                    best = Some((mark.len(), number));
                }
            } else if !is_end && mark.starts_with(rest) {
                may_be_longer = true;
            }
        }
        if may_be_longer {
            return Found::None { until: at };
        }
        if let Some((_, number)) = best {
            return Found::Mark { at, number };
        }
    }
    Found::None { until: text.len() }
}

/// Result of matching a mark at the start of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    Yes,
    No,
    /// The text is a prefix of the mark.
    Perhaps,
}

pub(super) fn begins(text: &str, mark: &str, is_end: bool) -> Begins {
    if text.starts_with(mark) {
        Begins::Yes
    } else if !is_end && mark.starts_with(text) {
        Begins::Perhaps
    } else {
        Begins::No
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_longest_marker_is_found_and_prefixes_wait() {
        let marks = ["<a>", "<a><b>", "[x]"];
        let find = |text: &str, is_end| find(text, marks.into_iter(), is_end);
        assert_eq!(find("no", false), Found::None { until: 2 });
        assert_eq!(find("no<", false), Found::None { until: 2 });
        assert_eq!(find("no<", true), Found::None { until: 3 });
        assert_eq!(find("é<a>", false), Found::None { until: 2 });
        assert_eq!(find("é<a>", true), Found::Mark { at: 2, number: 0 });
        assert_eq!(find("<a>x[x]", false), Found::Mark { at: 0, number: 0 });
        assert_eq!(find("<a><b>", false), Found::Mark { at: 0, number: 1 });
        assert_eq!(find("<a<[x]", false), Found::Mark { at: 3, number: 2 });
    }
}
