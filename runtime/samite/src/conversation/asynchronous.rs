//! Conversations for asynchronous programs, independent of the async runtime.

use super::{Conversation, ConversationError, Reply, Result};
use crate::CancelToken;
use crate::chat::{AnswerEvent, Content};
use async_channel::Receiver;
use futures_core::Stream;
use std::fmt;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll, ready};

/// Capacity of the event channel; generation blocks while the channel is full.
const WAITING: usize = 64;

type ConversationJob = Box<dyn FnOnce(&mut Conversation) + Send>;

/// A conversation in a thread of its own. Dropping it ends an answer in progress.
pub struct AsyncConversation {
    jobs: mpsc::Sender<ConversationJob>,
    cancel: CancelToken,
}

impl fmt::Debug for AsyncConversation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncConversation").finish_non_exhaustive()
    }
}

impl AsyncConversation {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system cannot start another thread.
    pub fn new(mut conversation: Conversation) -> std::io::Result<Self> {
        let cancel = conversation.context().options().cancel.clone();
        let (jobs, queue) = mpsc::channel::<ConversationJob>();
        samite_core::thread_builder()?
            .name("conversation".to_owned())
            .spawn(move || {
                for job in queue {
                    job(&mut conversation);
                }
            })?;
        Ok(Self { jobs, cancel })
    }

    /// Runs `act` on the conversation, for example to change options, add tools or take messages.
    /// Waits for an answer in progress.
    ///
    /// # Errors
    /// [`ConversationError::Gone`] if `act` or an earlier call of it panicked.
    pub async fn with<T: Send + 'static>(
        &mut self,
        act: impl FnOnce(&mut Conversation) -> T + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = async_channel::bounded(1);
        let job = move |conversation: &mut Conversation| {
            // The caller may have dropped its future.
            let _ = sender.try_send(act(conversation));
        };
        // If the thread has ended, the sender is dropped, which `recv` below reports.
        let _ = self.jobs.send(Box::new(job));
        receiver.recv().await.map_err(|_| ConversationError::Gone)
    }

    /// Asks a question. The answer starts at once and ends when the returned stream is dropped.
    pub fn ask(&mut self, content: impl Into<Content>) -> Answering<'_> {
        let content = content.into();
        let (sender, receiver) = async_channel::bounded(WAITING);
        let job = move |conversation: &mut Conversation| {
            // Reset first: cancelling a dropped earlier answer must not stop this one. A dropped
            // `Answering` closes its channel before it cancels, so the check below is reliable.
            conversation.context().options().cancel.reset();
            if sender.is_closed() {
                return;
            }
            let reply = conversation.ask_with(content, |event| {
                match sender.send_blocking(Ok(AnswerUpdate::Event(event.clone()))) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                }
            });
            let _ = sender.send_blocking(reply.map(|reply| AnswerUpdate::End(Box::new(reply))));
        };
        let _ = self.jobs.send(Box::new(job));
        Answering {
            updates: Box::pin(receiver),
            cancel: self.cancel.clone(),
            is_ended: false,
            conversation: PhantomData,
        }
    }
}

impl Drop for AsyncConversation {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// An item of the stream.
#[derive(Debug)]
pub enum AnswerUpdate {
    /// An event of the answer.
    Event(AnswerEvent),
    /// End of the answer, with the complete reply.
    End(Box<Reply>),
}

/// An answer in progress: a stream of its events. Dropping it ends the answer.
pub struct Answering<'a> {
    updates: Pin<Box<Receiver<Result<AnswerUpdate>>>>,
    cancel: CancelToken,
    is_ended: bool,
    conversation: PhantomData<&'a mut AsyncConversation>,
}

impl fmt::Debug for Answering<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answering").finish_non_exhaustive()
    }
}

impl Stream for Answering<'_> {
    type Item = Result<AnswerUpdate>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_ended {
            return Poll::Ready(None);
        }
        let update = ready!(self.updates.as_mut().poll_next(context));
        let update = update.unwrap_or(Err(ConversationError::Gone));
        self.is_ended = !matches!(update, Ok(AnswerUpdate::Event(_)));
        Poll::Ready(Some(update))
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.updates.close();
        if !self.is_ended {
            self.cancel.cancel();
        }
    }
}
