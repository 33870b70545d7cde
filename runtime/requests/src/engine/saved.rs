//! Saved texts: those that a request left in a slot, and cached prefixes for other servers.

use super::Engine;
use crate::prefix_cache::{CachedPrefix, Found, Key, Place};
use samite_llm::{Error, FIRST_IMAGE_ID, Images, Result, SavedSequence, ScaledAdapter};

impl Engine {
    /// Returns the most recently used text with this salt that a request left in the slot.
    fn left_by(&self, slot: usize, salt: u64) -> Option<&CachedPrefix> {
        let is_left = |text: &&CachedPrefix| text.slot == slot && text.key.1 == salt;
        let texts = self.kept.iter().filter(is_left);
        texts.max_by_key(|text| text.used)
    }

    /// Returns the text that a request with this [salt](crate::CacheOptions::salt) left in a slot,
    /// for a file, or `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if a device fails.
    pub fn save_slot(&mut self, slot: usize, salt: u64) -> Result<Option<SavedSequence>> {
        let left = self.left_by(slot, salt);
        let Some((sequence, tokens)) = left.map(|text| (text.sequence, text.tokens.clone())) else {
            return Ok(None);
        };
        let mut saved = self.context.save(sequence)?;
        saved.tokens = tokens;
        Ok(Some(saved))
    }

    /// Adds a saved text to the prefix cache, as if a request with this salt had left it in the
    /// slot.
    ///
    /// # Errors
    /// Returns an error if the text has another model or adapters that no request uses, is
    /// contradictory, or does not fit. Nothing is lost then except evicted prefixes.
    pub fn restore_slot(&mut self, slot: usize, salt: u64, saved: &SavedSequence) -> Result<usize> {
        let set = self.set_of(saved)?.unwrap_or(self.default_adapters);
        self.add_saved(saved, (set, salt), slot)
    }

    /// Adds a saved text to the prefix cache for requests with these adapters and this salt, and
    /// [holds](crate::CacheOptions::hold) it. `None` as adapters means the default ones.
    ///
    /// # Errors
    /// Returns an error if the text has another model or other adapters, is contradictory, or does
    /// not fit. Nothing is lost then except evicted prefixes.
    pub fn restore_prefix(
        &mut self,
        adapters: Option<&[ScaledAdapter]>,
        salt: u64,
        saved: &SavedSequence,
    ) -> Result<usize> {
        let set = adapters.map_or(self.default_adapters, |adapters| self.adapter_set(adapters));
        let length = self.add_saved(saved, (set, salt), 0)?;
        // Until the request comes for which it was fetched.
        self.kept.hold_last();
        Ok(length)
    }

    fn add_saved(&mut self, saved: &SavedSequence, key: Key, slot: usize) -> Result<usize> {
        let is_text = saved.tokens.len() == saved.len() && saved.has_no_gaps();
        let in_vocabulary = |token: u32| {
            let is_image = token >= FIRST_IMAGE_ID && self.limits.image > 0;
            is_image || (token as usize) < self.limits.vocabulary
        };
        if !is_text || !saved.tokens.iter().all(|&token| in_vocabulary(token)) {
            return Err(Error::InvalidArgument(
                "the saved sequence is no text: tokens are missing, or of another vocabulary"
                    .into(),
            ));
        }
        // Evict nothing for a text that cannot be used.
        self.context
            .check_restorable(saved, &self.adapters[key.0])?;
        self.room_for_text(saved.len());
        while self.kept.len() >= self.options.kept && self.evict_cheapest(None) {}
        let Some(sequence) = self.free_sequences.pop() else {
            return Err(Error::InvalidArgument("no sequence is free".into()));
        };
        let adapted = self.adapt(sequence, key.0);
        let restored = adapted.and_then(|()| self.context.restore(sequence, saved));
        if let Err(error) = restored {
            self.free(sequence);
            return Err(error);
        }
        let can_cut = self.context.kv_cache().can_truncate();
        let freed = self
            .kept
            .add(sequence, saved.tokens.clone(), key, slot, can_cut);
        freed.into_iter().for_each(|sequence| self.free(sequence));
        Ok(saved.len())
    }

    /// Saves the longest cached prefix of a prompt that a request with these adapters and this salt
    /// can reuse, and ends its [hold](crate::CacheOptions::hold). Returns `None` if there is none,
    /// or if `may_save` returns false for its bytes. `None` as adapters means the default ones.
    ///
    /// # Errors
    /// Returns an error if a device fails.
    pub fn save_prefix(
        &mut self,
        prompt: &[u32],
        adapters: Option<&[ScaledAdapter]>,
        salt: u64,
        may_save: impl FnOnce(usize) -> bool,
    ) -> Result<Option<SavedSequence>> {
        let set = adapters.map_or(self.default_adapters, |adapters| self.adapter_set(adapters));
        let running = std::iter::empty();
        let prompt_and_images = (prompt, &Images::default());
        let (found, _) =
            self.kept
                .find(&self.context, prompt_and_images, (set, salt), None, running);
        let Some(Found {
            place: Place::Cached(number),
            common,
        }) = found
        else {
            return Ok(None);
        };
        let Some(text) = self.kept.get(number) else {
            return Ok(None);
        };
        let (from, is_whole) = (text.sequence, common == text.tokens.len());
        self.kept.release(number);
        let save = |context: &mut samite_llm::Context, sequence| {
            if may_save(context.saved_bytes(sequence)?) {
                context.save(sequence).map(Some)
            } else {
                Ok(None)
            }
        };
        let saved = if is_whole {
            save(&mut self.context, from)?
        } else {
            let copy = self.sequence(Some(number), set)?;
            self.share(from, copy, common)?;
            let end = i32::try_from(common).unwrap_or(i32::MAX);
            let cut = self.context.kv_cache_mut().remove(copy, end..);
            let saved = cut.and_then(|()| save(&mut self.context, copy));
            self.free(copy);
            saved?
        };
        Ok(saved.map(|mut saved| {
            saved.tokens = prompt[..common].to_vec();
            saved
        }))
    }

    /// Removes the texts that requests with this salt left in a slot, and returns the number of
    /// tokens of the last one.
    pub fn erase_slot(&mut self, slot: usize, salt: u64) -> usize {
        let count = self.left_by(slot, salt).map_or(0, |text| text.tokens.len());
        let is_left = |text: &CachedPrefix| text.slot == slot && text.key.1 == salt;
        let gone = self.kept.remove_if(is_left);
        gone.into_iter().for_each(|sequence| self.free(sequence));
        count
    }
}
