//! A thread that computes the rows of images, so that other requests continue meanwhile.

use crate::event_queue::EngineWaker;
use samite_llm::ImageTokens;
use std::fmt::Debug;
use std::sync::{Arc, Weak, mpsc};

/// Computes the rows of images while the engine continues with other requests.
pub trait RequestRows: Debug + Send {
    /// Starts to compute the [rows](ImageTokens::rows) of an image. Calls `wake_engine` when they
    /// are computed.
    fn request_rows(&mut self, image: &Arc<ImageTokens>, wake_engine: EngineWaker);
}

/// A thread that computes the rows of images in the order in which they are requested. It skips
/// those of ended requests, and ends when this is dropped.
#[derive(Debug)]
pub(crate) struct ImageThread(mpsc::Sender<(Weak<ImageTokens>, EngineWaker)>);

impl ImageThread {
    /// Starts a thread.
    ///
    /// # Errors
    /// Returns an error if the system cannot create one.
    pub fn new() -> std::io::Result<Self> {
        let (sender, receiver) = mpsc::channel::<(Weak<ImageTokens>, EngineWaker)>();
        let thread = samite_core::thread_builder()?.name("images".to_owned());
        thread.spawn(move || {
            for (image, wake_engine) in receiver {
                if let Some(image) = image.upgrade() {
                    // The engine reads the error from the image.
                    let _ = image.rows();
                    wake_engine();
                }
            }
        })?;
        Ok(ImageThread(sender))
    }
}

impl RequestRows for ImageThread {
    fn request_rows(&mut self, image: &Arc<ImageTokens>, wake_engine: EngineWaker) {
        let sent = self.0.send((Arc::downgrade(image), wake_engine));
        if sent.is_err() {
            // The thread has ended. The image stores its error.
            let _ = image.rows();
        }
    }
}
