//! What callers hold: numbers that look like pointers, and the tables that say what they stand for.
//!
//! A number is never given twice, so a handle that was freed is known to be stale for ever.

use crate::entry::{Failure, Outcome};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Objects of one kind, by handle.
pub struct Handles<T> {
    what: &'static str,
    table: RwLock<BTreeMap<usize, Arc<T>>>,
}

/// The next handle. What looks at the lowest bits of a pointer finds them clear.
static NEXT: AtomicUsize = AtomicUsize::new(1 << 20);

/// A handle that nobody has.
pub fn fresh() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

impl<T> Handles<T> {
    /// No objects yet; `what` they are called in messages.
    pub const fn new(what: &'static str) -> Self {
        Handles {
            what,
            table: RwLock::new(BTreeMap::new()),
        }
    }

    /// Keeps an object, and gives its handle.
    pub fn add<P>(&self, object: T) -> *mut P {
        self.insert(fresh(), object)
    }

    /// Keeps an object under a [fresh](fresh) handle.
    pub fn insert<P>(&self, handle: usize, object: T) -> *mut P {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.insert(handle, Arc::new(object));
        std::ptr::without_provenance_mut(handle)
    }

    /// What a handle stands for.
    ///
    /// # Errors
    /// For null, and for what is no handle of this kind, or no more.
    pub fn get<P>(&self, handle: *const P) -> Outcome<Arc<T>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table
            .get(&handle.addr())
            .cloned()
            .ok_or_else(|| match handle.is_null() {
                true => Failure::new(format!("the {} is null", self.what)),
                false => Failure::new(format!(
                    "{handle:p} is no {}, or was freed already",
                    self.what
                )),
            })
    }

    /// Gives an object up; whoever works with it still has it. Null is nobody's.
    ///
    /// # Errors
    /// For what is no handle of this kind, or no more.
    pub fn remove<P>(&self, handle: *mut P) -> Outcome<Option<Arc<T>>> {
        if handle.is_null() {
            return Ok(None);
        }
        let removed = {
            let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
            table.remove(&handle.addr())
        };
        match removed {
            Some(object) => Ok(Some(object)),
            None => Err(Failure::new(format!(
                "{handle:p} is no {}, or was freed already",
                self.what
            ))),
        }
    }

    /// Gives up all objects but those that are to be kept.
    pub fn retain(&self, mut is_kept: impl FnMut(&T) -> bool) {
        let mut gone = Vec::new();
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.retain(|_, object| {
            let kept = is_kept(object);
            if !kept {
                gone.push(Arc::clone(object));
            }
            kept
        });
        // Objects end when the table is free again.
        drop(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_never_given_twice() {
        let handles = Handles::new("thing");
        let first: *mut u8 = handles.add(1);
        assert_eq!(
            handles.get(first.cast_const()).map(|one| *one).ok(),
            Some(1)
        );
        let kept = handles.remove(first).unwrap().unwrap();
        let second: *mut u8 = handles.add(2);
        assert!(first != second && handles.get(first.cast_const()).is_err());
        assert!(handles.remove(first).is_err() && *kept == 1);
        assert!(
            handles
                .remove::<u8>(std::ptr::null_mut())
                .unwrap()
                .is_none()
        );
        handles.retain(|number| *number != 2);
        assert!(handles.get(second.cast_const()).is_err());
    }
}
