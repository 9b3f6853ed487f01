"""What the cluster's secret makes: certificates, signatures of what etcd keeps, seals of what NATS carries.

`signed.py` stands round the control plane and `sealing.py` round the event plane, whichever is configured; they and
who opens a seal by itself are the only places where a broker's word becomes a member's.
"""
