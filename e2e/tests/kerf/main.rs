//! Kerf at work: pods come and go, GPUs reshape. All tests share one cluster.

mod drain;
mod policy;
mod ready;
mod shapes;
mod shared;
mod story;
mod unmanaged;
