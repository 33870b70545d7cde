//! Conversations for asynchronous programs, on whatever runtime they have.

use super::{Conversation, ConversationError, Reply, Result};
use crate::CancelToken;
use crate::chat::{Content, Event};
use async_channel::Receiver;
use futures_core::Stream;
use std::fmt;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll, ready};

/// Events that wait to be taken; the answer waits when there are more.
const WAITING: usize = 64;

type Job = Box<dyn FnOnce(&mut Conversation) + Send>;

/// A conversation in a thread of its own. When it is dropped, an answer that is under way ends.
pub struct AsyncConversation {
    jobs: mpsc::Sender<Job>,
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
    /// If the system has no thread left.
    pub fn new(mut conversation: Conversation) -> std::io::Result<Self> {
        let cancel = conversation.context().options().cancel.clone();
        let (jobs, queue) = mpsc::channel::<Job>();
        samite_core::thread_builder()?
            .name("conversation".to_owned())
            .spawn(move || {
                for job in queue {
                    job(&mut conversation);
                }
            })?;
        Ok(Self { jobs, cancel })
    }

    /// Does something with the conversation: changes its options, adds tools, takes its messages. It waits for an answer that is under way.
    ///
    /// # Errors
    /// [`ConversationError::Gone`] if `act` panicked, or one before it.
    pub async fn with<T: Send + 'static>(
        &mut self,
        act: impl FnOnce(&mut Conversation) -> T + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = async_channel::bounded(1);
        let job = move |conversation: &mut Conversation| {
            // Nobody may want to know any more.
            let _ = sender.try_send(act(conversation));
        };
        // If the thread is gone, the sender is dropped, and that is seen below.
        let _ = self.jobs.send(Box::new(job));
        receiver.recv().await.map_err(|_| ConversationError::Gone)
    }

    /// Asks. The answer begins at once, and ends when what this gives is dropped.
    pub fn ask(&mut self, content: impl Into<Content>) -> Answering<'_> {
        let content = content.into();
        let (sender, receiver) = async_channel::bounded(WAITING);
        let job = move |conversation: &mut Conversation| {
            // An answer that was dropped before is no reason to stop this one. One that is dropped closes its channel first, and cancels then.
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

/// What came next.
#[derive(Debug)]
pub enum AnswerUpdate {
    /// An event.
    Event(Event),
    /// The end of the answer, and all of it.
    End(Box<Reply>),
}

/// An answer as it comes: a stream of its events. It ends when this is dropped.
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
