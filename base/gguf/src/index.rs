//! Lookup by name without a second copy of the names.

/// Returns the indices of `items` sorted by name, for binary search.
///
/// # Errors
/// The index of the first item, in the order of `items`, with a repeated name.
pub(crate) fn sorted_index<T>(items: &[T], name: impl Fn(&T) -> &str) -> Result<Vec<u32>, usize> {
    let mut index: Vec<u32> = (0..items.len() as u32).collect();
    index.sort_by(|&a, &b| name(&items[a as usize]).cmp(name(&items[b as usize])));
    // The sort is stable, so the second of two neighbours with one name came later.
    let repeated = index
        .windows(2)
        .filter(|pair| name(&items[pair[0] as usize]) == name(&items[pair[1] as usize]))
        .map(|pair| pair[1] as usize)
        .min();
    match repeated {
        Some(repeated) => Err(repeated),
        None => Ok(index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_index_finds_the_first_duplicate() {
        assert_eq!(sorted_index(&["b", "c", "a"], |s| s), Ok(vec![2, 0, 1]));
        assert_eq!(sorted_index(&["b", "x", "a", "a", "b", "a"], |s| s), Err(3));
        assert_eq!(sorted_index::<&str>(&[], |s| s), Ok(vec![]));
    }
}
