"""Stores jobs and runs them. A job is a command to run once, such as the retraining of a pipeline.

These terms have one meaning in all modules:

- An *attempt* is one start of a job's command. A job gets another attempt if an attempt fails for a
  temporary cause, or if the attempt is *lost*: its process was killed or vanished before it wrote
  an outcome, or its runner was stopped.
- A *plain command* is a job that belongs to no pipeline.
- A *push job* is a job of a pipeline that a webhook's delivery created. A job *by hand* was
  submitted by a person.
- A job *answers for* the commits and deliveries that led to it: the outcome of the job is what
  became of them.
- While a push job is *pending* (not started yet), it *absorbs* later pushes: it answers for their
  commits too, so that one training learns the rows of all these pushes.
- A *runner* takes jobs from the store and runs them. It *leases* each job: for some seconds, no
  other runner may take the job. The runner extends the lease by *heartbeats*. If a runner dies, its
  leases run out, and another runner *adopts* its jobs.
"""
