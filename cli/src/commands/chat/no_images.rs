//! Stands for images where the program is built without them.

use super::Chat;
use crate::shown::say;
use samite::chat::Content;
use std::path::{Path, PathBuf};

pub(super) fn image_path(text: &str) -> PathBuf {
    text.into()
}

impl Chat {
    pub(super) fn dragged_image(&self, _line: &str) -> Option<PathBuf> {
        None
    }

    pub(super) fn add_image(&mut self, _path: &Path) {
        say("this samite was built without images: build it with --features vision");
    }

    pub(super) fn content(&self, text: &str) -> Content {
        text.into()
    }

    pub(super) fn forget_images(&mut self) {}
}
