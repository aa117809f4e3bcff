//! Kerf's decision engine measured beside other policies and bounds.
//!
//! | module | holds |
//! |---|---|
//! | [`workload`] | jobs that come and go: what is asked for of which GPUs, mixes, loads, seeds |
//! | [`fleet`] | clusters: one model, and several |
//! | [`rivals`] | other policies, made anew from their descriptions |
//! | [`bounds`] | what no policy can exceed |
//! | [`engine`] | Kerf's engine, without and with moves |
//! | [`online`] | the loss system that both are run in, and its tables |
//! | [`offline`] | queues planned at once, beside the optimum |
//! | [`cycle`] | time of one planning cycle |
//! | [`gangs`] | time to answer batches that want all or nothing |
//! | [`speed`] | decisions per second |
//! | [`clock`] | processor time |
//! | [`openb`], [`published`] | shares on the openb trace; what others published for it |
//! | [`plot`] | charts |
//! | [`numbers`] | means and confidence intervals over paired seeds |
pub mod bounds;
pub mod clock;
pub mod cycle;
pub mod engine;
pub mod fleet;
pub mod gangs;
pub mod numbers;
pub mod offline;
pub mod online;
pub mod openb;
pub mod plot;
pub mod published;
pub mod rivals;
pub mod speed;
pub mod workload;
