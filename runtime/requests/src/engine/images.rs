//! Images in prompts: requests their rows, and fits parts of prompts to them.

use super::Engine;
use crate::event::FailureKind;
use crate::image_thread::{ImageThread, RequestRows};
use samite_llm::PlacedImage;

impl Engine {
    /// Sets the object that computes the rows of images while the engine continues with other
    /// requests. Without it, the step that needs an image's rows computes them.
    pub fn set_request_rows(&mut self, request_rows: impl RequestRows + 'static) {
        self.request_rows = Some(Box::new(request_rows));
    }

    /// Starts a thread that computes the rows of images, if the context has room for images.
    pub(crate) fn start_image_thread(&mut self) -> std::io::Result<()> {
        if self.limits.image > 0 {
            self.set_request_rows(ImageThread::new()?);
        }
        Ok(())
    }

    /// Requests the rows of the next image that is not in the cache. Requests take turns: the rows
    /// of a request's next image are requested when those before are computed.
    fn request_image(&mut self, at: usize) {
        let active = &mut self.active[at];
        let (running, decoded) = (&mut active.running, active.decoded);
        if running.awaits_rows() {
            return;
        }
        let images = running.images.iter().zip(&mut running.is_requested);
        let mut missing = images.filter(|(one, requested)| one.end() > decoded && !**requested);
        let Some((one, requested)) = missing.next() else {
            return;
        };
        *requested = true;
        let wake_engine = running.event_queue.wake_engine();
        match &mut self.request_rows {
            Some(request) => request.request_rows(&one.image, wake_engine),
            // The image stores its error.
            None => drop(one.image.rows()),
        }
    }

    /// Returns the length of the next part of a prompt, of at most `budget` tokens, or more if it
    /// is an image that cannot be cut.
    pub(super) fn next_part(&self, at: usize, budget: usize) -> usize {
        let active = &self.active[at];
        let (images, decoded) = (&active.running.images, active.decoded);
        images.end_of_batch(decoded, decoded + active.pending().min(budget)) - decoded
    }

    /// Limits the next `count` tokens of a prompt to those before the next image, so that parts do
    /// not depend on when rows are computed, and requests rows. Returns more than `count` if they
    /// end within an image that cannot be cut, or 0 if that exceeds `room` or rows are missing.
    /// Returns `None` if the request failed.
    pub(super) fn fit_to_images(&mut self, at: usize, count: usize, room: usize) -> Option<usize> {
        if self.active[at].running.images.is_empty() || count == 0 {
            return Some(count);
        }
        self.request_image(at);
        let count = self.next_part(at, count);
        let width = self.context.model().spec().input_width();
        let active = &self.active[at];
        let first = active.decoded;
        let images = &active.running.images;
        let next = images.iter().find(|one| one.start > first);
        let end = next.map_or(first + count, |one| one.start.min(first + count));
        // With deterministic results, all rows are computed before the first part.
        let is_needed = |one: &&PlacedImage| {
            one.end() > first && (one.start < end || self.options.deterministic)
        };
        let needed = active.running.images.iter().filter(is_needed);
        let mut is_ready = true;
        let mut failure = None;
        for one in needed {
            match one.image.computed_rows() {
                None => is_ready = false,
                Some(Ok(rows)) if rows.len() == one.image.len() * width => {}
                Some(Ok(rows)) => {
                    failure = Some(format!(
                        "the rows of an image have {} elements, must be {} rows of {width}",
                        rows.len(),
                        one.image.len()
                    ));
                }
                Some(Err(error)) => failure = Some(format!("an image cannot be encoded: {error}")),
            }
        }
        if let Some(message) = failure {
            self.fail(at, FailureKind::Device, message);
            return None;
        }
        self.active[at].awaits_image = !is_ready;
        let count = if is_ready { end - first } else { 0 };
        let room = room.min(self.context.options().n_batch - self.batch.len());
        Some(if count > room { 0 } else { count })
    }
}
