"""Who asked for what, delays and GPU-seconds of jobs, the audit trail; unknown of older rows

Revision: 0005, after 0004.
"""

import sqlalchemy as sa

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
OWNED = ("plans", "measurements", "probes", "tasks", "sweeps")
INDEXED = ("plans", "probes", "tasks")
QUEUES = ("probes", "tasks")


def upgrade() -> None:
    for table in OWNED:
        op.add_column(table, sa.Column("asked_by", sa.Text(), nullable=True))
    for table in INDEXED:
        op.create_index(f"ix_{table}_asked_by_created_at", table, ["asked_by", "created_at"])
    for table in QUEUES:
        op.add_column(table, sa.Column("not_before", MOMENT, nullable=True))
        op.add_column(table, sa.Column("gpu_seconds", sa.Float(), nullable=True))
    op.create_table(
        "audit_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=True),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("gpu_seconds", sa.Float(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_events"),
        if_not_exists=True,  # a downgrade kept it
    )
    op.create_index(
        "ix_audit_events_asked_by_id", "audit_events", ["asked_by", "id"], if_not_exists=True
    )


def downgrade() -> None:
    count = sa.text("SELECT count(*) FROM audit_events")
    if not op.get_context().as_sql and op.get_bind().scalar(count) == 0:  # else it is kept
        op.drop_table("audit_events")
    for table in QUEUES:
        op.drop_column(table, "gpu_seconds")
        op.drop_column(table, "not_before")
    for table in INDEXED:
        op.drop_index(f"ix_{table}_asked_by_created_at", table_name=table)
    for table in reversed(OWNED):
        op.drop_column(table, "asked_by")
