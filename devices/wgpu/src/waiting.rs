//! Waits for the driver.
//!
//! Outside browsers, all of wgpu's futures complete at once, and polling the device runs callbacks.
//! In a browser, the waiting program is suspended until the page's event loop delivers the result.
//! This needs WebAssembly's promise integration, which not all browsers have. In both cases,
//! callers see a blocking function.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// True if compiled for browsers.
pub const IN_BROWSER: bool = cfg!(target_arch = "wasm32");

/// Returns the result of a future that is ready at once.
#[cfg(not(target_arch = "wasm32"))]
pub fn ready<T>(future: impl Future<Output = T>) -> Option<T> {
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// Returns the result of a future and suspends the program meanwhile. Returns `None` if the program
/// cannot be suspended.
#[cfg(target_arch = "wasm32")]
#[allow(deprecated)] // wasm-bindgen calls promise integration experimental
pub fn ready<T: 'static>(future: impl Future<Output = T> + 'static) -> Option<T> {
    let result = std::rc::Rc::new(std::cell::RefCell::new(None));
    let place = std::rc::Rc::clone(&result);
    let promise = js_sys::futures::future_to_promise(async move {
        *place.borrow_mut() = Some(future.await);
        Ok(wasm_bindgen::JsValue::UNDEFINED)
    });
    js_sys::futures::jspi_block_on_promise(&promise).ok()?;
    result.take()
}

/// The future result of a callback.
pub struct CallbackFuture<T>(Arc<Mutex<CallbackState<T>>>);

struct CallbackState<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

impl<T> Default for CallbackFuture<T> {
    fn default() -> Self {
        CallbackFuture(Arc::new(Mutex::new(CallbackState {
            value: None,
            waker: None,
        })))
    }
}

impl<T> Clone for CallbackFuture<T> {
    fn clone(&self) -> Self {
        CallbackFuture(Arc::clone(&self.0))
    }
}

impl<T> CallbackFuture<T> {
    /// Delivers the result.
    pub fn give(self, value: T) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.value = Some(value);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for CallbackFuture<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match state.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callback_future_resolves_once() {
        let answer = CallbackFuture::default();
        assert_eq!(ready(answer.clone()), None::<u32>);
        answer.clone().give(7);
        assert_eq!(ready(answer.clone()), Some(7));
        assert_eq!(ready(answer), None);
    }
}
